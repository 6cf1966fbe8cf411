"""`transformers serve` with models that `linbias.models.load` reads, on linbias.

    pip install 'transformers[serving]'
    python examples/serve.py serve FOLDER --continuous-batching --dtype bfloat16 --port 8000

The arguments are those of the command `transformers`. On its own it can name neither
attn_implementation="linbias" nor classes that are not Transformers' own, so that here another
loader stands in the place of its own. FOLDER holds weights, configuration and tokenizer.
"""

from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving import model_manager
from transformers.cli.transformers import app

from linbias.models import install, load


class ModelManager(model_manager.ModelManager):
    """Transformers' own, but that models run on linbias."""

    def _load_model(self, model_id_and_revision: str, **_: Any) -> PreTrainedModel:
        device = None if self.device == "auto" else self.device
        dtype = None if self.dtype == "auto" else self.dtype
        return load(model_id_and_revision.split("@")[0], device=device, dtype=dtype)


def main() -> None:
    install()  # so that tokenizers are found beside configurations of linbias, too
    model_manager.ModelManager = ModelManager
    app()


if __name__ == "__main__":
    main()
