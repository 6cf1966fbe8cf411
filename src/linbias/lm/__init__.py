"""Language models that are trained short and tested long: train, evaluate, extrapolate, generate."""
