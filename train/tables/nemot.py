"""Tables of modulation: Knowles 2022, chapter 3. Scores are 0 to 100, higher is better."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from compmod_jax.analysis.grid import Column
from compmod_jax.data.qa.example import FORMATS
from compmod_jax.data.qa.mixed import name_of
from compmod_jax.errors import check_choice
from compmod_jax.tasks.answering_config import AnsweringConfig
from train.experiment import Experiment, load_config
from train.tables.spec import Row, Spec, with_model

SCALES = {
  "tiny": "small simulated worlds told in English, on a CPU",
  "small": "the sets of $COMPMOD_DATA/qa together, an hour a run on a CPU",
  "paper": "the thesis's sets and size, on GPUs",
}
_VARIANTS = {"tiny": "worlds", "small": "general", "paper": "paper"}
_NEMOT, _OFF, _DECODER = "NeMoT", "gate off", "decoder"
_SHIFTED = ("facts", "names", "length")
# Table 3.7 and 3.8: NeMoT and GPT-2 Medium, our names of the columns.
_PUBLISHED = {
  "arc test": (38.53, 37.88),
  "openbookqa test": (49.80, 45.60),
  "mctest test": (56.19, 57.50),
  "boolq valid": (74.95, 74.40),
  "race valid": (48.43, 52.57),
  "squad2 valid": (52.72, 54.05),
  "narrativeqa test": (27.91, 26.11),
  "piqa unseen": (31.72, 10.39),
  "siqa unseen": (28.25, 24.92),
  "winogrande unseen": (36.94, 17.36),
}


def general(scale: str) -> Spec:
  """Tables 3.7 and 3.8: one model for all sets, in and out of the domain, against baselines.

  Raises:
    UserError: an unknown scale.
  """
  base = _experiment(scale)
  decoder = _experiment(scale, "-decoder")
  columns = _columns(base)
  published = [{c: pair[i] for c, pair in _PUBLISHED.items()} for i in range(2)]
  rows = {
    _DECODER: Row(decoder, published[1]),
    _OFF: Row(with_model(base, gate="off")),
    _NEMOT: Row(base, published[0]),
  }
  title = "General question answering (Knowles 2022, Tables 3.7 and 3.8)"
  return Spec(title, SCALES[scale], rows, _DECODER, columns)


def strategies(scale: str) -> Spec:
  """Table 3.10: reading strategies, one by one and together, at both positions.

  Raises:
    UserError: an unknown scale.
  """
  base = _experiment(scale)
  both = {"option_interaction": True, "highlighting": "vanilla"}
  rows: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "AOI": {"option_interaction": True},
    "highlighting": {"highlighting": "vanilla"},
    "highlighting, embedding": {"highlighting": "embedding"},
    "AOI and highlighting": both,
  }
  made = {name: Row(with_model(base, **changes)) for name, changes in rows.items()}
  title = "Reading strategies, from scratch (Knowles 2022, Table 3.10: fine-tuned)"
  return Spec(title, SCALES[scale], made, "none", _columns(base))


def _experiment(scale: str, suffix: str = "") -> Experiment:
  check_choice("--scale", scale, SCALES)
  base = load_config(f"configs/nemot_qa.py:{_VARIANTS[scale]}{suffix}")
  # A run that its clock stops is another run on another machine.
  return dataclasses.replace(base, time_limit_minutes=0.0)


def _columns(experiment: Experiment) -> tuple[Column, ...]:
  """What is compared: of worlds every format and number of facts, else every set."""
  task = experiment.task
  assert isinstance(task, AnsweringConfig)
  if len(task.data.seeds) == 1:
    cells = itertools.product(FORMATS, (1, 2, 3))
    found = [
      Column(f"{format.replace('_', ' ')} {facts}", "test", f"exact_match/{format}/{facts}")
      for format, facts in cells
    ]
    shifted = [Column(f"score {split}", split, "score") for split in _SHIFTED]
    return (Column("score test", "test", "score"), *found, *shifted)
  splits = {"valid": task.data.seeds, "test": task.data.seeds, "unseen": task.data.unseen}
  return tuple(
    Column(f"{name_of(data)} {split}", split, f"{name_of(data)}/score")
    for split, sets in splits.items()
    for data in sets
    if split == "unseen" or split in data.splits()
  )
