"""The paper's own path: its recipe, checkpoints and numbers. `linbias paper` on the command line."""
