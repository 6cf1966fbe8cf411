"""A language model with linear biases under Transformers' own `Trainer`, with your own data set.

    python examples/trainer.py                            # half a minute
    python examples/trainer.py --steps 2000 --output output/trainer

`linbias.models.LinbiasForCausalLM` is a Transformers model: Trainer, collators, callbacks,
checkpoints and `generate` are theirs. It trains on 64 tokens, is evaluated on 64 to 512, writes a
few words with a cache, and lies in the output folder, from where `linbias.models.load` takes it.
"""

import math
import sysconfig
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import linbias.models


class Segments(Dataset):
    """Text cut into examples of `length` tokens; the model shifts the labels itself."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length]
        tokens = torch.tensor(list(piece))
        return {"input_ids": tokens, "labels": tokens}


def read() -> tuple[bytes, bytes]:
    """Modules of the standard library as bytes: nine in ten to train on, the rest to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rest = b"".join(f.read_bytes() for number, f in enumerate(files) if number % 10)
    return rest, b"".join(f.read_bytes() for f in files[::10])


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--test-lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--test-bytes", type=int, default=16384)
    parser.add_argument("--output", help="folder of the model; default: one that is deleted")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run(chosen, chosen.output or folder)


def run(chosen: Namespace, folder: str) -> dict[int, float]:
    train_text, test_text = read()
    torch.manual_seed(0)
    config = linbias.models.LinbiasConfig(
        position="alibi",
        hidden_size=chosen.width,
        num_hidden_layers=chosen.layers,
        num_attention_heads=4,
    )
    model = linbias.models.LinbiasForCausalLM(config)
    settings = TrainingArguments(
        folder,
        max_steps=chosen.steps,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model, settings, train_dataset=Segments(train_text, 64))
    trainer.train()
    results = {}
    for length in chosen.test_lengths:
        found = trainer.evaluate(Segments(test_text[: chosen.test_bytes], length))
        results[length] = found["eval_loss"] / math.log(2)
        print(f"{length:>6} tokens: {results[length]:.3f} bits per byte")
    trainer.save_model(folder)
    again = linbias.models.load(folder, device="cpu")
    prompt = torch.tensor([list(b"def ")])
    written = again.generate(prompt, max_new_tokens=20, do_sample=False)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return results


if __name__ == "__main__":
    main()
