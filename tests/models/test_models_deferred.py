"""Modules made on the meta device, given memory, and set afterwards: deferred initialisation."""

import inspect
import sys

import pytest
import torch
from torch import nn

from linbias.compat.labml import AlibiMultiHeadAttention
from linbias.models import (
    LinbiasConfig,
    LinbiasForCausalLM,
    LinbiasForConditionalGeneration,
    LinbiasForMaskedLM,
    LinbiasSeq2SeqConfig,
)
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.decoder.config import BLOCKS, ENCODER_POSITIONS, POSITIONS
from linbias.models.encoders.bert import LinbiasBertModel
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.families import families
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.torch import MultiheadAttention, PointAttention

GARBAGE = 1e6
SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}


def causal(**changes):
    return lambda: LinbiasForCausalLM(LinbiasConfig(**SMALL, **changes))


def masked(name):
    return lambda: LinbiasForMaskedLM(LinbiasConfig(**SMALL, encoder_position=name))


BUILD = {
    "asymmetric layer": lambda: MultiheadAttention(16, 4, variant="asymmetric"),
    "sigmoid layer": lambda: MultiheadAttention(16, 4, variant="directional", learned="sigmoid"),
    "layer in 16 bits": lambda: MultiheadAttention(16, 4, learned=True, dtype=torch.bfloat16),
    "points": lambda: PointAttention(16, 4, learned=True),
    "labml": lambda: AlibiMultiHeadAttention(4, 16),
    "baichuan": lambda: BaichuanForCausalLM(BaichuanConfig(**SMALL, intermediate_size=8)),
    "bert": lambda: LinbiasBertModel(LinbiasBertConfig(**SMALL, intermediate_size=8)),
    "seq2seq": lambda: LinbiasForConditionalGeneration(LinbiasSeq2SeqConfig(**SMALL)),
    **{
        f"{block} {name}": causal(block=block, position=name)
        for name in POSITIONS
        for block in BLOCKS
    },
    **{name: masked(name) for name in ENCODER_POSITIONS},
    **{
        f"paper {position}": lambda position=position: PaperForCausalLM(
            PaperConfig(**SMALL, cutoffs=[10], adaptive_factor=2, position=position)
        )
        for position in ("alibi", "t5")
    },
}


def reset(module):
    getattr(module, "reset_parameters", list)()


@pytest.mark.parametrize("name", BUILD)
def test_all_weights_are_set_again(name):
    torch.manual_seed(0)
    one, other = BUILD[name](), BUILD[name]()
    with torch.device("meta"):
        model = BUILD[name]()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(GARBAGE)
        # children first: a module knows better than its parts how these are drawn
        model.apply(reset if name.startswith("paper") else getattr(model, "_init_weights", reset))
    drawn = one.state_dict(), other.state_dict()
    for key, x in model.state_dict().items():
        assert not (x == GARBAGE).any(), key
        first, second = (state[key] for state in drawn)
        assert x.dtype == first.dtype
        if torch.equal(first, second):  # no chance in it
            assert torch.equal(x, first), key
        else:
            assert 0.1 < x.std() / first.std() < 10, key


def test_no_module_of_ours_with_weights_of_its_own_is_left_out():
    families()  # which imports them
    built = {type(module) for build in BUILD.values() for module in build().modules()}
    kinds = {base for kind in built for base in kind.__mro__}
    mine = {
        kind
        for name, module in sys.modules.items()
        if name.startswith("linbias.")
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == name
    }
    makes = ("nn.Parameter(", "register_buffer(", "register_parameter(")
    own = {kind for kind in mine if any(word in inspect.getsource(kind) for word in makes)}
    assert len(own) >= 5 and own <= kinds, own - kinds
