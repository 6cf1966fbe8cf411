"""The paper's own path, `linbias paper`: its data, recipe, checkpoints and numbers."""
