"""The environment workbench: checks an environment, plays and shows its cases, without a model and without torch."""
