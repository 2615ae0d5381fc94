"""Fuzzy Boolean expressions by a neural interpreter (Rahaman et al. 2021; Kolios 2023, Table 4.2).

20 random expressions of 5 variables are learned, each by a CLS vector; then 10 others, by their CLS
vectors alone, with the types and signatures, or with all parameters.

Run:      python -m train.main --config configs/neural_interpreter.py --workdir runs/interpreter
          python -m train.main --config configs/neural_interpreter.py:cls --workdir runs/cls
Variants: (none)         20 expressions: under 10 minutes on 2 CPU cores
          cls            10 others, from runs/interpreter (--config.start=W): their CLS vectors
          types          and the signatures and type inference
          everything     and all else
          fresh          the same 10 from fresh parameters
          mlm            a masked language model on English sentences of the project's grammar
          debug          tiny, for a try
Seeds:    --config.seed=S --config.task.data.seed=S, the same ones before and after
Report:   python -m train.analyse functions --workdir W
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.models.neural_interpreter import InterpreterConfig
from compmod_jax.tasks.fuzzy_logic import FuzzyExpressions, FuzzyLogicConfig
from compmod_jax.training.experiment import Experiment, Phase, load_config
from compmod_jax.training.optimizer import OptimizerConfig, ParamGroup

# Variant -> groups of parameters that are trained, and steps.
ADAPTED = {
  "cls": ("cls", 3000),
  "types": ("cls+routing", 4000),
  "everything": ("all", 3000),
  "fresh": ("all", 4000),
}
# Largest learning rates of adaptation: fresh CLS vectors have far to go, trained parameters not.
CLS_RATE, TYPES_RATE, OTHERS_RATE = 0.1, 1e-2, 2e-3


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, ["", *ADAPTED, "mlm", "debug"])
  if variant == "mlm":
    return masked()
  if variant == "debug":
    return debug()
  return adapted(variant) if variant else expressions()


def expressions() -> Experiment:
  return Experiment(
    name="fuzzy expressions by a neural interpreter",
    task=FuzzyLogicConfig(),
    model=InterpreterConfig(
      dim=64, functions=5, iterations=2, heads=2, ffn_dim=128, activation="gelu_tanh"
    ),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=2e-3, schedule="cosine", warmup_steps=200, clip=1.0
    ),
    phases=(Phase(steps=4000),),
    log_every=50,
    evaluate_every=500,
    watch_sentences=0,
    keep_models=0,
  )


def adapted(variant: str) -> Experiment:
  base, (trained, steps) = expressions(), ADAPTED[variant]

  def rate(peak: float) -> OptimizerConfig:
    return dataclasses.replace(base.optimizer, learning_rate=peak, warmup_steps=50, clip=0.0)

  own = ParamGroup("cls", ("cls",), rate(CLS_RATE)), ParamGroup("routing", (), rate(TYPES_RATE))
  fresh = dataclasses.replace(
    base,
    name=f"ten more fuzzy expressions by a neural interpreter ({variant})",
    task=FuzzyLogicConfig(FuzzyExpressions(count=10, first=20)),
    phases=(Phase(steps=steps),),
  )
  if variant == "fresh":
    return fresh
  return dataclasses.replace(
    fresh,
    start="runs/interpreter",
    # Signatures stay where they are while the first expressions are learned.
    model=dataclasses.replace(base.model, train_signatures=variant != "cls"),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=OTHERS_RATE, warmup_steps=50),
    groups=own,
    phases=(Phase(trained, trainable=trained, steps=steps),),
  )


def masked() -> Experiment:
  base = load_config("mlm_cah:grammar")
  return dataclasses.replace(
    base,
    name="masked language model by a neural interpreter (grammar)",
    model=InterpreterConfig(
      dim=64, scripts=2, iterations=2, functions=4, ffn_dim=128, activation="gelu_tanh",
      dropout=0.1, max_length=base.model.max_length,
    ),
  )  # fmt: skip


def debug() -> Experiment:
  base = expressions()
  return dataclasses.replace(
    base,
    name="fuzzy expressions by a tiny neural interpreter",
    task=FuzzyLogicConfig(FuzzyExpressions(3, 4, more_literals=0), rows=16, eval_points=200),
    model=dataclasses.replace(
      base.model, dim=16, functions=3, heads=2, ffn_dim=16, code_dim=8, type_dim=4, type_hidden=8
    ),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=5e-3, warmup_steps=20),
    phases=(Phase(steps=300),),
    log_every=20,
    evaluate_every=150,
  )
