"""The position methods, one record each, which models, commands, reports and the explorer read.

This module imports nothing of the package, so that the command line and the explorer can name the
methods without loading PyTorch; the classes are in `linbias.models`.

To add a method: a class in `linbias/models/decoder/positions.py` (for encoders alone in
`bidirectional.py`; one whose layers learn the steps between tokens is a `Stepped` one), with the
paper that it comes from; a record here; what it computes, restated in plain code, in the test of
every method that asks for it: tests/models/test_models_positions.py,
tests/models/test_models_bidirectional.py (`added`). All other tests of methods read the records.

Every method has one colour for light and one for dark pages. They were chosen by search so that
each stands out from the page, and so that readers with any of the three kinds of colour blindness
can tell apart those that share a chart (tests/core/test_methods.py measures both). ALiBi and its
symmetric form for encoders never share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

DECODER, ENCODER, PAPER = "decoder", "encoder", "paper"
# The colours of attention weights and of the bias wherever they are drawn, on a light page and on
# a dark one.
WEIGHTS = ("#b3401b", "#f08a5d")
BIAS = ("#66707d", "#98a1ae")


@dataclass(frozen=True)
class Method:
    """What there is to know about a position method.

    Attributes:
        name: Its name in configurations and commands.
        label: Its name in reports and charts.
        colour: Of its lines on a light page, #RRGGBB.
        dark: Of its lines on a dark page.
        kind: Its class, as module and name below `linbias.models.decoder`.
        models: Which models may use it: "decoder" (`LinbiasConfig.position`), "encoder"
            (`LinbiasConfig.encoder_position`) and "paper" (`PaperConfig.position`).
        linear: Whether its bias is linear in distance.
        has_table: Whether it reads `train_length` tokens at most.
        even: The field of the configuration that must be even, if any.
    """

    name: str
    label: str
    colour: str
    dark: str
    kind: str
    models: tuple[str, ...] = (DECODER, ENCODER, PAPER)
    linear: bool = False
    has_table: bool = False
    even: str | None = None


_decoder = partial(Method, models=(DECODER,))
_sloped = partial(Method, models=(ENCODER,), linear=True)

METHODS = {
    method.name: method
    for method in (
        Method(
            "alibi",
            "ALiBi",
            "#24406F",
            "#6CAAFA",
            "positions.Alibi",
            models=(DECODER, PAPER),
            linear=True,
        ),
        _decoder("forget", "forget gates", "#964FFE", "#7246E5", "positions.Forget"),
        _decoder("cable", "CABLE, no weights", "#BF090A", "#A24E37", "positions.Cable"),
        _sloped("symmetric", "symmetric", "#24406F", "#6CAAFA", "bidirectional.Sloped"),
        _sloped(
            "directional",
            "directional",
            "#7E6DE9",
            "#9C70F9",
            "bidirectional.Directional",
            even="num_attention_heads",
        ),
        _sloped(
            "asymmetric", "asymmetric, learned", "#0E7776", "#42DAD2", "bidirectional.Asymmetric"
        ),
        _sloped("random", "random, fixed", "#961737", "#D55B7F", "bidirectional.RandomSlopes"),
        _sloped("littlebird", "LittleBird's", "#777417", "#BFD446", "bidirectional.LittleBird"),
        _sloped("window", "local window", "#209BBE", "#4A90B6", "bidirectional.LocalWindow"),
        Method(
            "sinusoidal",
            "sinusoidal",
            "#81050D",
            "#BB7A54",
            "positions.Sinusoidal",
            even="hidden_size",
        ),
        Method(
            "learned",
            "learned table",
            "#AD41AD",
            "#F6B8EB",
            "positions.Learned",
            models=(DECODER, ENCODER),
            has_table=True,
        ),
        Method("rotary", "rotary", "#088B68", "#62F7A2", "positions.Rotary", even="head_size"),
        Method("t5", "T5 bias", "#B08708", "#C8A038", "positions.T5"),
        Method("none", "no positions", "#556058", "#AEADB2", "positions.Position"),
    )
}


def methods_of(model: str) -> tuple[str, ...]:
    """The names of the methods that a kind of model may use.

    Example:
        >>> methods_of("paper")
        ('alibi', 'sinusoidal', 'rotary', 't5', 'none')
    """
    return tuple(name for name, method in METHODS.items() if model in method.models)
