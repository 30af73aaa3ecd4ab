"""Training on top of TRL: model, dataset, trainer, callbacks, checkpoints and evaluation."""
