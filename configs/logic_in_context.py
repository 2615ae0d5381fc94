"""Fuzzy logic in context: new combinations of terms (Schug et al. 2025).

A Transformer reads 16 points of an expression with their values and predicts the last one. `test`
has unseen combinations of the terms that training has, `ood` unseen terms; scored by R2.

Run:      python -m train.main --config configs/logic_in_context.py --workdir runs/logic
Variants: softmax, hyla, differential
                     forms of attention
          compete    heads compete
          gates      a gate on every head
                     (with both, feed-forward networks are narrower by as many parameters)
          (none)     softmax
          debug      tiny, for a try
          hyla-paper and the like
                     the published 50,000 steps, heads that are 2 wide, T5's positions and dropout
                     of attention
Seeds:    --config.seed=S --config.task.data.seed=S, which also draws the unseen combinations
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.synthetic.logic_in_context import LogicInContextData
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.tasks.logic_in_context import LogicInContextConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

# Variant -> fields of the model. Widths make up for routers and gates of heads.
MODELS: dict[str, dict[str, object]] = {
  "softmax": {},
  "hyla": {"attention_form": "hyla"},
  "differential": {"attention_form": "differential"},
  "compete": {"compete": ("decoder_self",), "ffn_dim": 178},
  "gates": {"gated_heads": ("decoder_self",), "ffn_dim": 252},
}
STEPS, PUBLISHED_STEPS = 8000, 50_000
# What the published program has, too.
PUBLISHED: dict[str, object] = {
  "head_dim": 2,
  "positions": "relative_bias",
  "relative_buckets": 128,
  "relative_distance": 128,
  "attention_dropout": 0.1,
}


def get_config(variant: str) -> Experiment:
  published = {f"{name}-paper" for name in MODELS}
  errors.check_choice("variant", variant, ["", *MODELS, *sorted(published), "debug"])
  if variant == "debug":
    return debug()
  model = variant.removesuffix("-paper") or "softmax"
  if variant not in published:
    return regression(model, STEPS)
  experiment = regression(model, PUBLISHED_STEPS)
  return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **PUBLISHED))


def regression(model: str, steps: int) -> Experiment:
  base = DecoderConfig(
    decoder_layers=2,
    dim=128,
    heads=8,
    ffn_dim=256,
    positions="relative",
    max_length=128,
    dropout=0.0,
  )
  return Experiment(
    name=f"fuzzy logic in context ({model})",
    task=LogicInContextConfig(),
    model=dataclasses.replace(base, **MODELS[model]),
    optimizer=OptimizerConfig(
      learning_rate=1e-3, schedule="cosine", warmup_steps=100, final_fraction=0.1, b2=0.999,
      weight_decay=0.1,
    ),
    phases=(Phase(steps=steps),),
    evaluate_every=steps // 5,
    model_selection="last",
  )  # fmt: skip


def debug() -> Experiment:
  base = regression("softmax", 200)
  return dataclasses.replace(
    base,
    task=LogicInContextConfig(
      LogicInContextData(variables=2, ood_share=0.0, points=8), rows=32, eval_sequences=200
    ),
    model=dataclasses.replace(base.model, dim=16, heads=2, ffn_dim=32),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=5e-3, warmup_steps=20),
    log_every=20,
    evaluate_every=100,
  )
