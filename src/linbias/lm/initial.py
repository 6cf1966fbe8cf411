"""The model that a run starts from: fresh weights, or those of a model that was trained before,
whose tokenizer and whatever gives its weights a meaning then stay.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from linbias._run.files import fingerprint
from linbias.data.corpus import Corpus
from linbias.data.tokenizers import Tokenizer
from linbias.lm.settings import TrainSettings
from linbias.models.decoder.config import LinbiasConfig
from linbias.models.decoder.linbias import LinbiasForCausalLM, LinbiasForMaskedLM
from linbias.models.families import find_family
from linbias.models.loading import Files, load

LanguageModel = LinbiasForCausalLM | LinbiasForMaskedLM
_KINDS: dict[str, type[LanguageModel]] = {
    "causal": LinbiasForCausalLM,
    "masked": LinbiasForMaskedLM,
}
# These fields may differ from those of the model to go on from: its weights do not depend on them.
_MAY_DIFFER = set(
    "hidden_dropout attention_dropout attention_implementation slope_scale initializer_range "
    "use_cache".split()
)


def initial_config(settings: TrainSettings, corpus: Corpus) -> LinbiasConfig:
    """The configuration of the model to train; a `ValueError` names a field that cannot be."""
    if settings.init is None:
        defaults = {"encoder_position": "symmetric"} if settings.task == "masked" else {}
        return LinbiasConfig(
            **{**defaults, **settings.model},
            vocab_size=corpus.tokenizer.vocab_size,
            train_length=settings.length,
            **corpus.tokenizer.special_ids,
        )
    before = config_of(settings.init)
    if settings.task != ("causal" if before.encoder_position is None else "masked"):
        raise ValueError(
            f"TrainSettings: task must be that of the model of init, got {settings.task!r} "
            f"(its position method is {before.method!r})"
        )
    for name, value in settings.model.items():
        if name not in _MAY_DIFFER and value != getattr(before, name):
            raise ValueError(
                f"LinbiasConfig: {name} must be {getattr(before, name)!r}, as in the model "
                f"of init, got {value!r}"
            )
    if corpus.tokenizer.backend.to_str() != Tokenizer.load(settings.init).backend.to_str():
        raise ValueError(
            "train: corpus must be tokenised as the model of init reads (`with_tokenizer_of` does "
            f"it), got {corpus.tokenizer.vocab_size:,} tokens of another tokenizer"
        )
    length = settings.length
    if before.method == "learned":
        if length > before.train_length:
            raise ValueError(
                f"TrainSettings: length must be at most {before.train_length}, the rows of init's "
                f"table of learned positions, got {length}"
            )
        length = before.train_length
    changes = {**settings.model, "train_length": length}
    return LinbiasConfig.from_dict({**before.to_dict(), **changes})


def initial_model(settings: TrainSettings, config: LinbiasConfig) -> LanguageModel:
    """The model before its first step; fresh weights are drawn from PyTorch's random state."""
    model = _KINDS[settings.task](config)
    if settings.init is not None:
        model.load_state_dict(load(settings.init, device="cpu").state_dict())
    return model


def config_of(folder: str) -> LinbiasConfig:
    """The configuration of a model to go on from, which must be of the project's own family."""
    try:
        if not Path(folder).is_dir():
            raise ValueError(f"{folder!r} is no folder")
        files = Files.at("TrainSettings", folder)
        family = find_family(files.settings, set())
        config = None if family is None else family.read_config(files.settings, set())
    except Exception as error:  # damaged or hostile files can raise anything
        raise ValueError(
            f"TrainSettings: init must be a folder that `linbias train` made, got {folder!r}"
        ) from error
    if type(config) is not LinbiasConfig:
        raise ValueError(
            f"TrainSettings: init must be a model of `linbias train`, got {folder!r}, "
            f"whose model_type is {files.model_type!r}"
        )
    return config


def weights_of(folder: str) -> dict[str, str]:
    """A fingerprint of every file of a model's weights, by name."""
    return {path.name: fingerprint(path) for path in sorted(Path(folder).glob("*.safetensors"))}


def with_tokenizer_of(folder: str, corpus: Corpus) -> Corpus:
    """The same text, read with the tokenizer "bytes", as the tokens of a model in a folder."""
    tokenizer = Tokenizer.load(folder)
    description = tokenizer.backend.to_str()
    if description == corpus.tokenizer.backend.to_str():
        return corpus
    digest = hashlib.sha256(f"{corpus.fingerprint} {description}".encode()).hexdigest()
    # The ids of the byte tokenizer are the bytes.
    return replace(
        corpus,
        tokenizer=tokenizer,
        fingerprint=digest,
        train=tokenizer.encode(corpus.train.tobytes()),
        valid=tokenizer.encode(corpus.valid.tobytes()),
        test=tokenizer.encode(corpus.test.tobytes()),
    )
