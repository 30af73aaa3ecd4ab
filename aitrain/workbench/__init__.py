"""The environment workbench: write an environment, check it, play it, and score saved episodes again."""
