"""What NeMoT's gate costs, and a GPT-2 of ours beside Hugging Face's, in training and generation.

    python -m benchmarks.nemot [--quick] [--json FILE] [--check]

Needs the environment of `make test-peers`. CPU, float32, random weights. A decoder shaped as GPT-2,
6 layers of width 384, 8,192 tokens, batches of 8 x 128, against `GPT2LMHeadModel` with the same
weights; NeMoT has it as vanilla set, as many neuromodulatory layers and 2 output layers.

The gate is compared with a model that runs the same layers, forward and backward, on the same
tokens: the neuromodulatory stream is added to the vanilla set's output where it would gate it. That
is an edit of `gated` and `gate` (`compmod_jax.core.intermediates`); no sigmoid is computed then.

Training: the training program's whole step, with its metrics (the gate's statistics among them) and
checks for non-finite values; PyTorch at its best: fused AdamW, fused attention and GELU, the faster
of eager and compiled. Dropout on in both. Generation: 64 tokens, greedy, after prompts of 128,
against Hugging Face's `generate` with its cache, outputs compared. Last, bare products of both
libraries.
"""

import dataclasses
import functools
import tempfile
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, products
from benchmarks.peer_gpt2 import Theirs, random_gpt2
from compmod_jax.checkpoints.gpt2 import read_gpt2, vanilla_sizes
from compmod_jax.core.intermediates import Edit
from compmod_jax.decoding import greedy
from compmod_jax.models.nemot import LM, MODULATORY, NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks.causal_lm import CausalLM, CausalLMConfig
from compmod_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from compmod_jax.training.step import init_state, make_step, trainable_mask

ROUNDS = 20
BATCHES = (1, 16)  # of generation
OPTIMIZER = OptimizerConfig(
  learning_rate=1e-4, schedule="constant", warmup_steps=0, b2=0.999, weight_decay=0.01
)
END, LAST = 0, 1  # no text ends by itself; all prompts end with the same token, as `greedy` wants


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes of the models and of their batches."""

  layers: int = 6
  dim: int = 384
  heads: int = 6
  vocab: int = 8192
  rows: int = 8
  length: int = 128
  new: int = 64

  @property
  def output_layers(self) -> int:
    """Layers of NeMoT's output set: a quarter of the vanilla set's, as in the thesis."""
    return -(-self.layers // 4)

  def products(self) -> list[tuple[int, int, int]]:
    """Sizes of GPT-2's largest products forward, in training and of one token a row."""
    many = self.rows * self.length
    return [
      (rows, self.dim, columns)
      for rows in (many, max(BATCHES))
      for columns in (3 * self.dim, 4 * self.dim, self.vocab)
    ]

  def task(self, model: Any, edits: Mapping[str, Edit] | None = None) -> CausalLM:
    """The language modelling task without data."""
    tokenizer: Any = types.SimpleNamespace(vocab_size=self.vocab, pad=END, eos=END)
    length = self.length + 1
    config = CausalLMConfig(length=length, batch_tokens=self.rows * length, joined=True)
    return config.build_with(model, tokenizer).edited(edits or {})

  def batch(self) -> dict[str, np.ndarray]:
    """Random blocks, each a token longer than what the model reads."""
    shape, random = (self.rows, self.length + 1), np.random.default_rng(0)
    return {
      "tokens": random.integers(1, self.vocab, shape).astype(np.int32),
      "index": np.arange(self.rows, dtype=np.int32),
    }

  def prompts(self, rows: int) -> np.ndarray:
    """Random prompts [rows, length] without padding."""
    random = np.random.default_rng(1)
    tokens = random.integers(LAST, self.vocab, (rows, self.length)).astype(np.int32)
    tokens[:, -1] = LAST
    return tokens

  def operations(self) -> dict[str, float]:
    """Floating-point operations a token of a forward pass, from the sizes of all products."""
    layer = 2 * 12 * self.dim**2 + 4 * self.length * self.dim
    head = 2 * self.dim * self.vocab
    modulated = 2 * self.layers + self.output_layers
    return {"GPT-2": self.layers * layer + head, "NeMoT": modulated * layer + head}


class Ours(NamedTuple):
  """One of our models, and calls that run it."""

  case: Case
  task: CausalLM
  params: Any

  def step(self) -> Callable[[], Any]:
    """A call that makes one training step and returns its metrics."""
    optimizer, rate = make_optimizer(OPTIMIZER, 10_000), learning_rate(OPTIMIZER, 10_000)
    state = init_state(self.params, (), optimizer, 0.0)
    state = jax.tree.map(jnp.array, state)  # donation needs buffers of its own for every leaf
    mask = trainable_mask(state.params, "all")
    step = make_step(self.task, optimizer, rate, micro_batches=1, ema=0.0, mask=mask)
    step, key = jax.jit(step, donate_argnums=0), jax.random.key(0)
    batch = jax.tree.map(jnp.asarray, self.case.batch())

    def run() -> Any:
      nonlocal state
      state, found = jax.block_until_ready(step(state, batch, key))
      return found

    return run

  def forward(self) -> Callable[[], Any]:
    """A call that gives the logits of a batch."""
    forward, batch = jax.jit(self.task.model.forward), jax.tree.map(jnp.asarray, self.case.batch())
    return lambda: jax.block_until_ready(forward(self.params, batch))

  def generation(
    self, rows: int, rewrite: Callable[..., Any] = lambda generate: generate
  ) -> Callable[[], Any]:
    """A call that goes on from prompts: tokens [rows, new], of which the last is the end."""
    new, model, auxiliary = self.case.new, self.task.model.module, None
    if isinstance(model.config, NemotConfig):
      auxiliary = jnp.asarray([model.config.auxiliary_ids("dec", LM)] * rows)

    def generate(params: Any, prompts: jax.Array) -> jax.Array:
      text, apply = Text(prompts[:, :-1], auxiliary), functools.partial(model.apply, params)
      cache = apply(text, LM, beams=1, length=new, method="prefill")

      def step(cache: Any, tokens: jax.Array) -> Any:
        return apply(cache, tokens, LM, method="step")

      sizes = {"batch": rows, "max_length": new, "limit": jnp.full(rows, new)}
      return greedy(step, cache, **sizes, bos=LAST, eos=END, pad=END).tokens[:, 0]

    jitted, prompts = jax.jit(rewrite(generate)), jnp.asarray(self.case.prompts(rows))
    return lambda: np.asarray(jitted({"params": self.params}, prompts))


class Models(NamedTuple):
  """What is compared."""

  theirs: Theirs
  ours: Ours
  nemot: Ours
  not_gated: Ours


def models(case: Case) -> Models:
  """All models, random weights: GPT-2 twice with the same ones, NeMoT likewise."""
  theirs = random_gpt2(case, positions=case.length + case.new, empty=END)
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = read_gpt2(folder)
  nemot = NemotConfig(
    modulatory_layers=case.layers,
    output_layers=case.output_layers,
    dropout=ours.config.dropout,
    **vanilla_sizes(ours.config),
  )
  params = nn.unbox(jax.jit(case.task(nemot).model.init)(jax.random.key(0)))
  params["head"]["bias"] = params["head"]["bias"].at[END].set(-100.0)
  return Models(
    Theirs(case, theirs, OPTIMIZER, END),
    Ours(case, case.task(ours.config), jax.device_put(ours.params)),
    Ours(case, case.task(nemot), params),
    Ours(case, case.task(nemot, added_in(nemot)), params),
  )


def added_in(config: NemotConfig) -> dict[str, Edit]:
  """Edits with which the neuromodulatory stream is added in place of gating."""
  held: list[jax.Array] = []

  def hold(stream: jax.Array) -> jax.Array:
    held.append(stream[:, config.before :])
    return stream

  return {
    f"{MODULATORY}/layer_{config.modulatory_layers - 1}/output": hold,
    "gate": jnp.ones_like,
    "gated": lambda x: x + held.pop(),
  }


def forward(report: common.Report, m: Models) -> None:
  """Logits of a batch."""
  runs = {"NeMoT": m.nemot.forward(), "GPT-2": m.ours.forward()} | _peers(report, m.theirs.forward)
  difference = float(np.abs(runs["GPT-2"]() - runs["Hugging Face eager"]().numpy()).max())
  report.note(f"logits differ by {difference:.1e} at most on the same weights")
  if difference > 1e-3:
    raise RuntimeError("the two GPT-2s do not compute the same")
  _compare(report, "forward", runs, m.ours.case)


def training(report: common.Report, m: Models) -> None:
  """Training steps, of NeMoT with its gate and without."""
  runs = {
    "NeMoT": m.nemot.step(),
    "NeMoT, not gated": m.not_gated.step(),
    "GPT-2": m.ours.step(),
    **_peers(report, m.theirs.step),
  }
  seconds = _compare(report, "training", runs, m.ours.case, at_most=0.9)
  plain = seconds["NeMoT, not gated"]
  report.claim("training: gated / not gated", seconds["NeMoT"], plain, at_most=1.03)


def _peers(report: common.Report, run: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
  """PyTorch's calls, eager and compiled."""
  found = {"Hugging Face eager": run(compiled=False)}
  if not report.options.quick:
    found["Hugging Face compiled"] = run(compiled=True)
  return found


def _compare(
  report: common.Report, group: str, runs: common.Runs, case: Case, **target: float
) -> dict[str, np.ndarray]:
  """Measures calls on a batch; our GPT-2 beside the faster of PyTorch's, and beside NeMoT."""
  seconds = report.measure(group, runs, ROUNDS, amount=case.rows * case.length, unit="tokens")
  best = min((n for n in runs if "Hugging" in n), key=lambda n: np.median(seconds[n]))
  report.claim(f"{group}: our GPT-2's time / {best}'s", seconds["GPT-2"], seconds[best], **target)
  report.claim(f"{group}: NeMoT / GPT-2, both ours", seconds["NeMoT"], seconds["GPT-2"])
  return seconds


def generation(report: common.Report, m: Models, rows: int) -> None:
  """Greedy generation after prompts, outputs compared."""
  runs = {
    name: model.generation(rows)
    for name, model in (("NeMoT", m.nemot), ("GPT-2", m.ours), ("Hugging Face", m.theirs))
  }
  new = m.ours.case.new
  group = f"generation, {rows} x {new}"
  mine, other = (runs[name]()[:, :-1] for name in ("GPT-2", "Hugging Face"))
  same = int(np.sum(np.all(mine == other, axis=1)))
  report.note(f"{group}: the same tokens in {same} of {rows}, {len(np.unique(mine))} different")
  if same < rows:
    raise RuntimeError("the two GPT-2s do not generate the same")
  seconds = report.measure(group, runs, ROUNDS, amount=rows * new, unit="tokens")
  speed = f"{group}: our GPT-2's speed / Hugging Face's"
  report.claim(speed, seconds["Hugging Face"], seconds["GPT-2"], at_least=1.0)
  report.claim(f"{group}: NeMoT / GPT-2, both ours", seconds["NeMoT"], seconds["GPT-2"])


def main() -> None:
  parser = common.options(__doc__)
  options = parser.parse_args()
  if options.device != "cpu":
    parser.error("--device gpu is not measured here; leave it out.")
  report = common.start("NeMoT, and GPT-2 against Hugging Face's", options)
  quick = Case(layers=1, dim=128, heads=2, vocab=1000, rows=4, length=64, new=16)
  case = quick if options.quick else Case()
  compared = models(case)
  forward(report, compared)
  training(report, compared)
  for rows in BATCHES:
    generation(report, compared, rows)
  products.compare(report, case.products())
  floor = case.operations()
  report.note(f"floor by arithmetic, NeMoT / GPT-2: {floor['NeMoT'] / floor['GPT-2']:.2f}")
  report.finish()


if __name__ == "__main__":
  main()
