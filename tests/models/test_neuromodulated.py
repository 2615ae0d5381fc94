"""Networks with gates and without: sizes, what the gate does, names that filters choose by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.parameters import names
from compmod_jax.models.neuromodulated import NeuromodulatedConfig, fresh_rows

SHAPE, CLASSES = (9, 9, 1), 7
KINDS = ("anml", "oml", "plain")


def config(kind):
  return NeuromodulatedConfig(kind=kind, blocks=2, filters=4, modulator_filters=3)


def made(kind, outputs=CLASSES):
  module = config(kind).classifier(SHAPE, outputs)
  images = jnp.asarray(np.random.default_rng(0).random((5, *SHAPE)), jnp.float32)
  return module, jax.jit(module.init)(jax.random.key(0), images)["params"], images


def size(params):
  return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("kind", ["oml", "plain"])
def test_networks_without_a_gate_have_as_many_parameters_and_features(kind):
  shape = (28, 28, 1)
  wanted = NeuromodulatedConfig().sizes(shape)
  sizes = NeuromodulatedConfig(kind=kind).sizes(shape)
  assert sizes.features == wanted.features
  assert sizes.count == pytest.approx(wanted.count, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_of_parameters_is_right(kind):
  _, params, _ = made(kind)
  sizes = config(kind).sizes(SHAPE)
  assert size(params) == sizes.count + CLASSES * sizes.features


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_products_of_features_and_the_rows_of_classes(kind):
  module, params, images = made(kind)
  features = module.apply(
    {"params": params}, images, module.apply({"params": params}, images, method="context"),
    method="features",
  )  # fmt: skip
  expected = features @ params["prediction"]["head"]["kernel"].T
  np.testing.assert_allclose(module.apply({"params": params}, images), expected, rtol=1e-5)
  headless, own, _ = made(kind, 0)
  assert "head" not in own["prediction"]
  np.testing.assert_allclose(headless.apply({"params": params}, images), features, rtol=1e-5)


def test_the_gate_is_a_factor_between_0_and_1_of_the_last_hidden_layer():
  module, params, images = made("anml")
  intermediates = Intermediates(capture=None)
  module.apply({"params": params}, images, intermediates=intermediates)
  found = intermediates.captured
  assert list(found) == ["gate", "hidden", "features", "logits"]
  assert np.all((found["gate"] > 0) & (found["gate"] < 1))
  np.testing.assert_allclose(found["features"], found["hidden"] * found["gate"], rtol=1e-6)
  closed = Intermediates(edits={"gate": jnp.zeros_like})
  assert not np.any(module.apply({"params": params}, images, intermediates=closed))


def test_a_closed_gate_keeps_what_is_behind_it_from_learning():
  module, params, images = made("anml")

  def loss(params, edit):
    logits = module.apply({"params": params}, images, intermediates=Intermediates(edits=edit))
    return jnp.sum(jnp.sin(logits))

  slope = jax.jit(jax.grad(lambda p: loss(p, {"gate": lambda gate: gate.at[:, 0].set(0)})))(params)
  assert not np.any(slope["prediction"]["head"]["kernel"][:, 0])
  assert np.any(slope["prediction"]["head"]["kernel"][:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_no_picture_changes_the_logits_of_another(kind):
  module, params, images = made(kind)
  run = jax.jit(lambda images: module.apply({"params": params}, images))
  whole = run(images)
  for row, image in enumerate(images):
    np.testing.assert_allclose(run(image[None])[0], whole[row], rtol=1e-4, atol=1e-5)


def test_names_tell_networks_apart():
  found = {kind: {name.split("/")[0] for name in names(made(kind)[1])} for kind in KINDS}
  assert found == {
    "anml": {"modulator", "prediction"},
    "oml": {"representation", "prediction"},
    "plain": {"prediction"},
  }
  assert set(names(made("oml")[1]["prediction"])) == {"head/kernel", "layer/kernel", "layer/bias"}


def test_fresh_rows_have_the_scale_that_is_asked_for():
  rows = fresh_rows(jax.random.key(0), 400, 50, 3.0)
  assert np.std(rows) == pytest.approx(3 * np.sqrt(2 / 50), rel=0.02)
  assert not np.any(fresh_rows(jax.random.key(0), 4, 5, 0.0))


def test_what_does_not_fit_is_refused():
  with pytest.raises(UserError, match=r"model\.blocks is 1"):
    NeuromodulatedConfig(blocks=1)
  with pytest.raises(UserError, match="must be \\[height"):
    NeuromodulatedConfig().classifier((9,), 3)
  with pytest.raises(UserError, match="one place left"):
    NeuromodulatedConfig().classifier((8, 8, 1), 3)
