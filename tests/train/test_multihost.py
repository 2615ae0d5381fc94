"""Two processes of four devices each train like one process of eight, whatever happens to them."""

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from programs import (
  Place,
  Program,
  assert_as_uninterrupted,
  computed,
  metrics_of,
  state_of,
  steps_saved,
  train,
  write_data,
)

from train.experiment import load_experiment

STEPS = 24
CONFIG = """
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.text import TextData
from compmod_jax.data.tokenizer import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.sharding import MeshConfig
from compmod_jax.tasks.translation import TranslationConfig
from train.experiment import Experiment, Phase
from train.optimizer import OptimizerConfig

def get_config(variant):
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=TextData(folder="$TINY_DATA"),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=128, buckets=(8,)),
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=16, heads=2, ffn_dim=16, max_length=16, norm="pre",
      dropout=0.1, share_embeddings="all", compete=("encoder_self",), expert_layers=("decoder",),
      experts=ExpertsConfig(4, competition=CompetitionConfig(rule="top_k", keep=1, balance=0.1)),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, clip=1.0),
    phases=(Phase(steps=24),),
    mesh=MeshConfig(data=-1, fsdp=2, expert=2),
    evaluate_every=12,
    log_every=3,
    checkpoint_every=4,
    keep_last=20,
    keep_models=1,
  )
"""


class Pair:
  """Two processes that train together, of four devices each."""

  def __init__(self, place: Place, workdir: Path, *options: str):
    together = ("--multihost", f"--multihost.coordinator=127.0.0.1:{free_ports()}")
    self.stack = contextlib.ExitStack()
    self.programs = [
      self.stack.enter_context(
        Program(
          place,
          workdir,
          *together,
          f"--multihost.process={number}",
          "--multihost.processes=2",
          *options,
          devices=4,
        )
      )
      for number in range(2)
    ]

  def __enter__(self) -> list[Program]:
    return self.programs

  def __exit__(self, *_: object) -> None:
    self.stack.close()


def free_ports() -> int:
  """A free port whose neighbour is free too."""
  while True:
    with socket.socket() as one, socket.socket() as two:
      one.bind(("127.0.0.1", 0))
      port = one.getsockname()[1]
      with contextlib.suppress(OSError, OverflowError):
        two.bind(("127.0.0.1", port + 1))
        return port
