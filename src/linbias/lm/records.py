"""What an extrapolation experiment leaves: a record for each training and each evaluation.

On disk, a record is one flat JSON object: a line of results.jsonl, and an entry of results.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from linbias._run.files import Record
from linbias.lm.evaluation import Evaluation
from linbias.lm.settings import ExtrapolateSettings
from linbias.lm.training import LanguageModelMetrics


@dataclass(frozen=True)
class TrainingRecord:
    """How one model was trained.

    Attributes:
        method: Its value of `LinbiasConfig.position`.
        train_length: Tokens per training sequence.
        seed: Of its training.
        metrics: What the training measured.
        date: When it ended.
    """

    method: str
    train_length: int
    seed: int
    metrics: LanguageModelMetrics
    date: str

    @staticmethod
    def key(method: str, train_length: int, seed: int) -> Record:
        """What distinguishes the record of a model from the others, as JSON values."""
        model = {"method": method, "train_length": train_length, "seed": seed}
        return {"kind": "training", **model}

    def to_dict(self) -> Record:
        """The flat JSON object."""
        key = self.key(self.method, self.train_length, self.seed)
        return {**key, **self.metrics.to_dict(), "date": self.date}

    @classmethod
    def from_dict(cls, record: Record) -> TrainingRecord:
        """The reverse of `to_dict`.

        Raises:
            ValueError: The record lacks a field; it is named.
        """
        names = ("method", "train_length", "seed", "date")
        _check_fields(record, (*names, *_required(LanguageModelMetrics)))
        metrics = LanguageModelMetrics.from_dict(record)
        return cls(**{name: record[name] for name in names}, metrics=metrics)


@dataclass(frozen=True)
class EvaluationRecord:
    """How well one model predicts the test text at one length.

    Attributes:
        method: Its value of `LinbiasConfig.position`.
        train_length: Tokens per training sequence.
        seed: Of its training.
        evaluation: What was measured.
        date: When it was measured.
    """

    method: str
    train_length: int
    seed: int
    evaluation: Evaluation
    date: str

    @property
    def test_length(self) -> int:
        """Tokens read at a time."""
        return self.evaluation.length

    @property
    def bits_per_byte(self) -> float:
        bits = self.evaluation.bits_per_byte
        assert bits is not None  # the experiment always gives the text's size
        return bits

    @staticmethod
    def key(method: str, train_length: int, seed: int, test_length: int) -> Record:
        """What distinguishes the record from the others, as JSON values."""
        model = {"method": method, "train_length": train_length, "seed": seed}
        return {"kind": "evaluation", **model, "test_length": test_length}

    def to_dict(self) -> Record:
        """The flat JSON object."""
        key = self.key(self.method, self.train_length, self.seed, self.test_length)
        return {**key, **self.evaluation.to_dict(), "date": self.date}

    @classmethod
    def from_dict(cls, record: Record) -> EvaluationRecord:
        """The reverse of `to_dict`.

        Raises:
            ValueError: The record lacks a field; it is named.
        """
        names = ("method", "train_length", "seed", "date")
        _check_fields(record, (*names, *(f.name for f in fields(Evaluation))))
        evaluation = Evaluation.from_dict(record)
        return cls(**{name: record[name] for name in names}, evaluation=evaluation)


def _required(kind: type[Any]) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [f.name for f in fields(kind) if f.default is MISSING]


def _check_fields(record: Record, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in record]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")


@dataclass(frozen=True)
class ExtrapolationResults:
    """What results.json holds.

    Attributes:
        made: How the results were made, in words.
        settings: What was compared.
        trainings: A record per model.
        evaluations: A record per model and test length.
    """

    made: dict[str, str]
    settings: ExtrapolateSettings
    trainings: tuple[TrainingRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "made": self.made,
            "settings": asdict(self.settings),
            "trainings": [record.to_dict() for record in self.trainings],
            "evaluations": [record.to_dict() for record in self.evaluations],
        }

    @classmethod
    def from_dict(cls, results: dict[str, Any]) -> ExtrapolationResults:
        """The reverse of `to_dict`, also when it went through JSON."""
        return cls(
            made=results["made"],
            settings=ExtrapolateSettings.from_dict(results["settings"]),
            trainings=tuple(map(TrainingRecord.from_dict, results["trainings"])),
            evaluations=tuple(map(EvaluationRecord.from_dict, results["evaluations"])),
        )
