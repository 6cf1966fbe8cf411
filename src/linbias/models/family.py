"""What `load` knows of models that are recognised and loaded alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Settings = Mapping[str, Any]  # the contents of a config.json
Weights = dict[str, Tensor]  # by name; of a folder that is only looked at, on the device "meta"
Classes = Mapping[str, type[PreTrainedModel]]  # by task, the one of the folder's own first


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that are recognised and loaded alike.

    Attributes:
        name: For errors and tables.
        recognises: Whether a config.json, and the names of the weights beside it, are of such a model.
        read_config: The configuration that they mean; ValueError where it asks for what is not built.
        classes: What can be made of a model.
        tasks: Those of the classes that fit a configuration, its own first; None: all.
        config: What `install` makes known to Transformers, together with the classes.
        rename: Original weights under our names; None where they have these names.
        fields_of_task: The fields of the configuration that a task means, given the names of the
            weights.
        fused: Whether the model is one of Transformers, that `fuse` then runs on our attention.
        encoder: What turns a text into tokens, given the folder; None: a tokenizer of
            Transformers.
        needs_tokenizer_json: Who writes tokenizer.json, without which there is no tokenizer.
    """

    name: str
    recognises: Callable[[Settings, set[str]], bool]
    read_config: Callable[[Settings, set[str]], PreTrainedConfig]
    classes: Classes
    tasks: Callable[[Any], tuple[str, ...]] | None = None
    config: type[PreTrainedConfig] | None = None
    rename: Callable[[Weights], Weights] | None = None
    fields_of_task: Callable[[str, set[str]], dict[str, Any]] | None = None
    fused: bool = False
    encoder: Callable[[str], Callable[[bytes], NDArray[Any]]] | None = None
    needs_tokenizer_json: str | None = None


def own_family(kind: type[PreTrainedConfig], classes: Classes, **more: Any) -> Family:
    """A family whose configuration and weights are as our classes have them."""
    return Family(
        name=kind.model_type,
        recognises=lambda settings, _: settings.get("model_type") == kind.model_type,
        read_config=lambda settings, _: kind.from_dict(dict(settings)),
        classes=classes,
        config=kind,
        **more,
    )
