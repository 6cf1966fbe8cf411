"""Language models that are trained short and tested long: train, evaluate, extrapolate, generate."""

from linbias import _extras

_extras.require("linbias.lm")
