"""What an extrapolation experiment leaves: a record for each training and each evaluation.

On disk, a record is one flat JSON object: a line of results.jsonl, and an entry of results.json.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from linbias._run.files import Record
from linbias.lm.evaluation import Evaluation
from linbias.lm.settings import ExtrapolateSettings
from linbias.lm.training import LanguageModelMetrics


@dataclass(frozen=True)
class _ModelRecord:
    """What was measured of one model: which one it is, and when the measurement ended."""

    kind: ClassVar[str]
    measured: ClassVar[tuple[str, type[Any]]]  # the field with the numbers, and its type

    method: str
    train_length: int
    seed: int
    date: str = field(kw_only=True)

    @property
    def key(self) -> Record:
        """What distinguishes the record from the others, as JSON values."""
        model = {"method": self.method, "train_length": self.train_length, "seed": self.seed}
        return {"kind": self.kind, **model}

    def to_dict(self) -> Record:
        return {**self.key, **getattr(self, self.measured[0]).to_dict(), "date": self.date}

    @classmethod
    def from_dict(cls, record: Record) -> Self:
        """The reverse of `to_dict`; a `ValueError` names the fields that the record lacks."""
        part, kind = cls.measured
        names = ("method", "train_length", "seed", "date")
        required = (f.name for f in fields(kind) if f.default is MISSING)
        missing = [name for name in (*names, *required) if name not in record]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return cls(**{name: record[name] for name in names}, **{part: kind.from_dict(record)})


@dataclass(frozen=True)
class TrainingRecord(_ModelRecord):
    """How one model was trained."""

    kind, measured = "training", ("metrics", LanguageModelMetrics)

    metrics: LanguageModelMetrics


@dataclass(frozen=True)
class EvaluationRecord(_ModelRecord):
    """How well one model predicts the test text at one length."""

    kind, measured = "evaluation", ("evaluation", Evaluation)

    evaluation: Evaluation

    @property
    def test_length(self) -> int:
        return self.evaluation.length

    @property
    def bits_per_byte(self) -> float:
        bits = self.evaluation.bits_per_byte
        assert bits is not None  # the experiment always gives the text's size
        return bits

    @property
    def key(self) -> Record:
        return {**super().key, "test_length": self.test_length}


@dataclass(frozen=True)
class ExtrapolationResults:
    """What results.json holds: how it was made, in words; what was compared; and the records."""

    made: dict[str, str]
    settings: ExtrapolateSettings
    trainings: tuple[TrainingRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]

    def to_dict(self) -> dict[str, Any]:
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
