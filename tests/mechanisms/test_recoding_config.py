"""Settings of recoding: what is refused, and with what words."""

import dataclasses

import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.recoding.config import AnchorConfig, RecodingConfig


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"size": -1.0}, "recoding.size is -1.0; it must not be negative"),
    ({"step": "learned", "size": 0.0}, "a learned step size starts at a positive one"),
    ({"step": "predicted", "size": 0.0}, "a predicted step size starts at a positive one"),
    ({"steps": 0}, "recoding.steps is 0; it must be at least 1"),
    ({"step": "safe", "steps": 2}, "recoding.steps is 2, but recoding.step is safe"),
    ({"samples": 0}, "recoding.samples is 0"),
    ({"rate": 1.0}, "recoding.rate is 1.0"),
    ({"share": 1.5}, "recoding.share is 1.5; it must lie between 0 and 1"),
    ({"only": (0, -1)}, r"recoding.only is \(0, -1\); steps are counted from 0"),
    ({"signal": "nll", "classifier": "c.json"}, "recoding.signal is nll, which has no use for it"),
  ],
)
def test_a_bad_setting_is_named_with_its_rule(settings, message):
  with pytest.raises(UserError, match=message):
    RecodingConfig(**settings)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"variance": 0.0}, "anchor.variance is 0.0; it must be positive"),
    ({"weight_decay": -1.0}, "anchor.weight_decay is -1.0; it cannot be negative"),
  ],
)
def test_a_bad_prior_is_named_with_its_rule(settings, message):
  with pytest.raises(UserError, match=message):
    AnchorConfig(**settings)


@pytest.mark.parametrize(
  ("when", "train", "use"),
  [("always", True, True), ("train", True, False), ("test", False, True)],
)
def test_recoding_applies_when_it_says(when, train, use):
  config = RecodingConfig(signal="nll", when=when)
  assert (config.applies(train=True), config.applies(train=False)) == (train, use)
  nothing = dataclasses.replace(config, signal="none")
  assert not nothing.applies(train=True)
  assert not nothing.applies(train=False)
