"""Where attention heads look: positions, syntactic relations, rare tokens, separators.

Everything is beside two controls: the same model with fresh parameters, and the same attention with
every query's weights dealt out anew to the keys that it may read. Sentences are read in two halves,
so that what is chance in one does not repeat in the other.

Sources: Kolios 2023, section 4.4 (after Voita et al. 2019 and Clark et al. 2019) and Figure 3.8
(after Cordonnier et al. 2021).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from compmod_jax.analysis.heads.sums import untrained
from compmod_jax.analysis.reading import NOTHING, Reader, read_sentence, reader, without_text
from compmod_jax.analysis.report.style import site_order
from compmod_jax.analysis.roles.importance import Importance, Ways, mean
from compmod_jax.analysis.roles.pruning import Pruned, Pruning, sweep
from compmod_jax.analysis.subject import Module, Subject, drawn
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.losses import cross_entropy
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.layers.attention import Attention
from compmod_jax.tasks.base import Batch

Sums = dict[str, Any]

PLACES = {"previous": -1, "itself": 0, "next": 1}
"""Name of a relative position -> key's number less query's."""
FIRST, SEPARATOR, RAREST = "first", "separator", "rarest"
KINDS = ("word", "punctuation", "separator")
"""Kinds of keys: separators are all control and special tokens, those before a text included."""
REACH = 10  # tokens to either side among which the best fixed offset is looked for
ROLES = ("positional", "syntactic", "rare", "other")
"""What heads are called; see `role_of`."""
_POSITIONAL, _SYNTACTIC, _RARE, _LEAST = 0.9, 0.1, 0.5, 20
_QUERIES = 128  # queries of a batch on which heads are compared


class Look(NamedTuple):
  """Where the heads of a module look, from sums over queries that may read at least two keys.

  Attributes:
    module: whose heads.
    names: of the targets, in their order there.
    sums: of `look_sums`, over the heads of its group.
    heads: which of these are the module's.
  """

  module: Module
  names: Sequence[str]
  sums: Sums
  heads: slice

  def _of(self, target: str, name: str) -> np.ndarray:
    return self.sums["targets"][name][self.names.index(target)]

  def share(self, target: str, *, shuffled: bool = False) -> np.ndarray:
    """How often the largest weight is on a target, of the queries that may read one, [heads]."""
    hits = self._of(target, "shuffled" if shuffled else "hits")
    return _ratio(hits[self.heads], self._of(target, "count"))

  def chance(self, target: str) -> float:
    """The same share of a key that is drawn at random."""
    return float(_ratio(self._of(target, "chance"), self._of(target, "count")))

  def count(self, target: str) -> int:
    """How many queries may read a target."""
    return int(self._of(target, "count")) if target in self.names else 0

  def best_offset(self, target: str) -> tuple[int, float]:
    """The fixed offset that hits a target most often, and its share."""
    offsets = self._of(target, "offsets")
    best = int(np.argmax(offsets))
    return best - REACH, float(_ratio(offsets[best], self._of(target, "count")))

  @property
  def targets(self) -> list[str]:
    """Names of all targets that some query may read."""
    return [name for name in self.names if self.count(name) > 0]

  @property
  def entropy(self) -> np.ndarray:
    """Mean entropy of a query's weights in nats, [heads]; NaN where they are no distribution."""
    return _ratio(self.sums["entropy"][self.heads], self.sums["queries"])

  @property
  def most_entropy(self) -> float:
    """Mean entropy of uniform weights."""
    return float(_ratio(self.sums["limit"], self.sums["queries"]))

  def weight(self, kind: str, *, shuffled: bool = False) -> np.ndarray:
    """Mean weight on all keys of a kind together, [heads]."""
    weights = self.sums["dealt" if shuffled else "weight"]
    return _ratio(weights[KINDS.index(kind), self.heads], self.sums["queries"])

  def gradient(self, kind: str) -> np.ndarray | None:
    """Mean absolute gradient of a batch's loss in nats with respect to one weight, [heads]."""
    if "gradient" not in self.sums:
      return None
    number = KINDS.index(kind)
    return _ratio(self.sums["gradient"][number, self.heads], self.sums["weights"][number])


class Heads(NamedTuple):
  """Heads of modules whose queries and keys are the same, and how far they are apart.

  Attributes:
    heads: module and number of each.
    divergence: mean Jensen-Shannon divergence of the weights of a query in nats, [heads, heads];
      NaN where they are no distribution.
  """

  heads: list[tuple[Module, int]]
  divergence: np.ndarray


class Pass(NamedTuple):
  """What one pass over sentences shows.

  Attributes:
    looks: name of a module -> where its heads look.
    groups: name of a group of comparable modules -> its heads.
  """

  looks: dict[str, Look]
  groups: dict[str, Heads]


class Spectrum(NamedTuple):
  """Cumulative shares of the squared singular values of W_Q W_K^T, by rank.

  Attributes:
    heads: of each head's own product, [heads, ranks].
    together: of the product of all heads' matrices side by side, [ranks]; of independent mechanisms
      together, which read slices of their own.
  """

  heads: np.ndarray
  together: np.ndarray


class Measured(NamedTuple):
  """What attention heads do.

  Attributes:
    modules: all modules of attention that run in every half.
    halves: the trained model on two halves of the sentences (one, where there is one sentence).
    untrained: fresh parameters on the first half; None if that was not asked for.
    importance: in each half; empty if it was not asked for.
    untrained_importance: of fresh parameters, in the first half.
    spectra: module -> of the trained model.
    untrained_spectra: module -> of fresh parameters.
    relations: names of the gold relations among the sentences' words.
    counted: sentences of each half.
    weighed: sentences of each half on which importance was measured.
    pruned: which heads are left, for every price of a head.
  """

  modules: list[Module]
  halves: list[Pass]
  untrained: Pass | None
  importance: list[Importance]
  untrained_importance: Importance | None
  spectra: dict[str, Spectrum]
  untrained_spectra: dict[str, Spectrum]
  relations: list[str]
  counted: list[int]
  weighed: list[int]
  pruned: list[Pruned]


@dataclasses.dataclass(frozen=True)
class Roles:
  """What attention heads do: where they look (positions, syntax, rare tokens, separators), how
  alike they are and how much they matter by four ways, each beside an untrained model and shuffled
  attention; the spectra of their weights."""

  importance: int = 250
  """Sentences of each half on which importance is measured; 0: not at all."""
  steps: int = 8
  """Steps of the integral in integrated gradients."""
  untrained: bool = True
  """Also measure the same model with fresh parameters, drawn by --seed."""
  prune: Pruning = Pruning()
  """Prices at which heads are pruned, such as --prune.prices 0.001 0.01 0.1."""

  def __post_init__(self):
    check_least(self, "--", importance=0, steps=1)
    errors.check(
      self.importance > 0 or not self.prune.prices,
      "--prune.prices is given but --importance is 0; heads that are left are compared with those"
      " whose ablation costs most. Give --importance a number of sentences.",
    )

  def measure(self, subject: Subject) -> Measured:
    """Measures the model on two halves of the sentences, and with fresh parameters on the first.

    Raises:
      UserError: the model has no attention, or the split has nothing to read.
    """
    modules = attention_modules(subject)
    errors.check(
      bool(modules),
      "The model has no attention: none of its sites ends in /attention. Give another model.",
    )
    read = reader(subject.task)
    halves = halves_of(subject)
    used = [frozenset[str]().union(*running_sites(half).values()) for half in halves]
    modules = [m for m in modules if all(f"{m.name}/attention" in sites for sites in used)]
    fresh = untrained(subject) if self.untrained else None
    looking = Looking(subject, read, modules)
    passes = [looking(half, subject.params) for half in halves]
    before = None if fresh is None else looking(halves[0], fresh)
    importance: list[Importance] = []
    before_importance, parts, pruned = None, [], list[Pruned]()
    if self.importance and any(module.dim for module in modules):
      parts = [drawn(half.numbers, self.importance, subject.seed) for half in halves]
      shown = [module for module in modules if module.dim]
      ways = Ways(subject, read, shown, parts, self.steps)
      importance = ways(subject.params)
      before_importance = None if fresh is None else ways(fresh)[0]
      pruned = sweep(ways.subject, read, shown, mean(importance, "ablation"), self.prune)
    return Measured(
      modules,
      passes,
      before,
      importance,
      before_importance,
      spectra(subject, subject.params),
      {} if fresh is None else spectra(subject, fresh),
      looking.relations,
      [len(half.numbers) for half in halves],
      [len(part) for part in parts],
      pruned,
    )


def attention_modules(subject: Subject) -> list[Module]:
  """All modules that record `attention`, in the order of the model; `dim` 0 without `heads`."""
  outputs = {module.name: module for module in subject.modules if module.kind == "heads"}
  found = []
  for site, shape in subject.shapes.items():
    name = site.removesuffix("/attention")
    if name != site and len(shape) == 4:
      found.append(outputs.get(name, Module(name, "heads", shape[1], 0, False)))
  return sorted(found, key=lambda module: site_order(module.name))


def running_sites(subject: Subject) -> dict[frozenset[str], frozenset[str]]:
  """Columns of a batch -> the sites of a model that run on batches of these columns.

  A model with an output for each task runs only the outputs of the tasks that a batch holds.
  """
  found = dict[frozenset[str], frozenset[str]]()

  def trace(params: PyTree, batch: Batch) -> None:
    intermediates = Intermediates(capture=None)
    subject.task.model.forward(params, batch, intermediates=intermediates)
    found[frozenset(batch)] = frozenset(intermediates.captured)

  for batch in subject.batches:
    if frozenset(batch) not in found:
      jax.eval_shape(trace, subject.params, batch)
  return found


def halves_of(subject: Subject) -> list[Subject]:
  """The subject on each of two halves of its sentences, drawn at random; on one if it is alone."""
  numbers = np.random.default_rng(subject.seed).permutation(subject.numbers)
  parts = np.array_split(numbers, min(2, len(numbers)))
  return [dataclasses.replace(subject, chosen=np.sort(part)) for part in parts]


def token_counts(subject: Subject, read: Reader, stream: str) -> np.ndarray:
  """How often each token of a stream stands in training, [vocab]."""
  counts = np.zeros(read.tokenizer(stream).vocab_size, np.int64)
  for batch in subject.task.dataset.eval_batches("train", multiple=subject.sharing.multiple):
    ids = read.tokens(stream, {name: np.asarray(value) for name, value in batch.items()})
    counts += np.bincount(ids[ids != NOTHING], minlength=len(counts))
  return counts


# What is known of the keys: made once for each batch, as arrays that lie beside its tokens.


def token_kinds(tokenizer: Tokenizer) -> np.ndarray:
  """The number in KINDS of every token, int8 [vocab]."""
  kinds = np.zeros(tokenizer.vocab_size, np.int8)
  marks = without_text(tokenizer)
  for number in range(tokenizer.vocab_size):
    if number in marks:
      kinds[number] = KINDS.index("separator")
    elif read_sentence(tokenizer, [number]).mark[0]:
      kinds[number] = KINDS.index("punctuation")
  return kinds


def beside_tokens(
  subject: Subject, read: Reader, stream: str, counts: np.ndarray, names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
  """For each batch what is known of the positions of a stream.

  Args:
    subject: the sentences.
    read: how to read them.
    stream: which.
    counts: of tokens in training, [vocab].
    names: of relations, of the form that `both_ways` gives.

  Returns:
    `kind` int8 [batch, time]; `rank` float32 [batch, time], how often the token stands in training,
    infinite where no word is shown; `relations/<name>` bool [batch, time, time], whether the second
    position's word is what the first one's is related to.
  """
  tokenizer = read.tokenizer(stream)
  kinds, found = token_kinds(tokenizer), []
  for batch in subject.batches:
    tokens, hidden = read.tokens(stream, batch), read.hidden(stream, batch)
    kind = np.where(tokens == NOTHING, KINDS.index("separator"), kinds[tokens]).astype(np.int8)
    shown = (kind == KINDS.index("word")) & ~hidden
    part: dict[str, np.ndarray] = {
      "kind": kind,
      "rank": np.where(shown, counts[tokens], np.inf).astype(np.float32),
    }
    shape = (*tokens.shape, tokens.shape[1])
    related = {name: np.zeros(shape, bool) for name in names}
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      gold = read.relations(stream, subject.split, int(batch["index"][row]))
      word = np.asarray(read_sentence(tokenizer, tokens[row].tolist()).word) if gold else None
      for name, dependent, head in gold or ():
        ours, others = word == dependent, word == head
        up, down = both_ways(name)
        related[up][row] |= ours[:, None] & others[None]
        related[down][row] |= others[:, None] & ours[None]
    found.append({**part, **{f"relations/{name}": value for name, value in related.items()}})
  return found


def both_ways(relation: str) -> tuple[str, str]:
  """Names of the two directions in which a query may look along a relation."""
  return f"{relation} → head", f"head → {relation}"


def relation_names(subject: Subject, read: Reader) -> list[str]:
  """Both directions of every relation that gold has in a subject's sentences."""
  found: set[str] = set()
  for stream in read.streams:
    for number in subject.numbers:
      found |= {name for name, _, _ in read.relations(stream, subject.split, int(number)) or ()}
  return [name for relation in sorted(found) for name in both_ways(relation)]


# One pass over the sentences.


class Looking:
  """Adds up where heads look; all passes share what is compiled.

  Args:
    subject: the model.
    read: how to read its sentences.
    modules: of attention.
  """

  def __init__(self, subject: Subject, read: Reader, modules: Sequence[Module]):
    self.subject, self.read = subject, read
    self.relations = relation_names(subject, read)
    self.counts = {stream: token_counts(subject, read, stream) for stream in read.streams}
    self.groups: dict[str, list[Module]] = {}
    running = running_sites(subject).values()
    for module in modules:
      site = f"{module.name}/attention"
      name = self._group(site)
      if not all(site in sites for sites in running):
        name += f", {module.name.partition('/')[0]} alone"
      if through_site(module) in subject.shapes:
        name += f", through {module.title}"
      self.groups.setdefault(name, []).append(module)
    self._step = jax.jit(self._sums)

  def _group(self, site: str) -> str:
    """What modules with the same queries and keys have in common."""
    ours, theirs = self.read.stream(site), self.read.key_stream(site)
    before = self.subject.task.model.config.auxiliary_at(site)
    name = ours if ours == theirs else f"{ours} to {theirs}"
    return f"{name} behind auxiliary tokens" if before else name

  def _targets(self, modules: Sequence[Module]) -> list[str]:
    """What the heads of a group could look at; relations are between words of one stream."""
    site = f"{modules[0].name}/attention"
    own = self.read.stream(site) == self.read.key_stream(site)
    return [*PLACES, FIRST, SEPARATOR, RAREST, *(self.relations if own else ())]

  def __call__(self, part: Subject, params: PyTree) -> Pass:
    """What these parameters do on some sentences."""
    nothing, key = jax.tree.map(jnp.zeros_like, params), jax.random.key(part.seed)
    known = {
      stream: beside_tokens(part, self.read, stream, counts, self.relations)
      for stream, counts in self.counts.items()
    }
    totals: Sums = {}
    for number, batch in enumerate(part.batches):
      more = {
        f"roles/{stream}/{name}": value
        for stream, parts in known.items()
        for name, value in parts[number].items()
      }
      keys = jax.random.fold_in(key, number)
      found = jax.device_get(self._step(params, nothing, part.place({**batch, **more}), keys))
      found = jax.tree.map(lambda value: np.asarray(value, np.float64), found)
      for name, sums in found.items():
        totals[name] = jax.tree.map(np.add, totals[name], sums) if name in totals else sums
      part.status(f"attention on {part.split}", number + 1, len(part.batches))
    looks, groups = {}, {}
    for name, modules in self.groups.items():
      heads = [(module, head) for module in modules for head in range(module.units)]
      sums = totals[name]
      if sums["distributions"] < sums["queries"] * len(heads):
        nothing = {key: np.full_like(sums[key], np.nan) for key in ("entropy", "divergence")}
        sums = {**sums, **nothing}
      groups[name] = Heads(heads, _ratio(sums["divergence"], sums["compared"]))
      start = 0
      for module in modules:
        heads = slice(start, start + module.units)
        looks[module.name] = Look(module, self._targets(modules), sums, heads)
        start += module.units
    return Pass(looks, groups)

  def _sums(self, params: PyTree, nothing: PyTree, batch: Batch, key: jax.Array) -> Sums:
    """Sums of a batch, of every group of modules that runs on it."""
    model = self.subject.task.model
    every = [module for modules in self.groups.values() for module in modules]
    sites = [f"{module.name}/attention" for module in every]
    depth = [site for module in every if (site := through_site(module)) in self.subject.shapes]

    def run(params: PyTree, edits: Mapping[str, Edit]) -> dict[str, jax.Array]:
      intermediates = Intermediates(capture=frozenset([*sites, *depth]), edits=edits)
      model.forward(params, batch, intermediates=intermediates)
      return {site: value.astype(jnp.float32) for site, value in intermediates.captured.items()}

    captured = run(params, {})
    attention = {site: captured[site] for site in sites if site in captured}
    through = {site: captured[site] for site in depth if site in captured}
    # With all parameters 0 all logits are equal: weights are positive where a query may read, in
    # one head at least (penalties on distances leave nothing of far keys in the steepest ones).
    # Which tokens go through a layer is as in the model itself.
    edits = {site: jax.tree_util.Partial(_instead, value) for site, value in through.items()}
    uniform = run(nothing, edits)
    slopes = self._gradients(params, batch, attention)
    found = {}
    for number, (name, modules) in enumerate(self.groups.items()):
      of = [f"{module.name}/attention" for module in modules]
      if of[0] not in attention:
        continue
      weights = jnp.concatenate([attention[site] for site in of], axis=1)
      allowed = jnp.any(uniform[of[0]] > 0, axis=1)
      asked = model.valid_mask(of[0], batch) & (jnp.sum(allowed, axis=-1) >= 2)
      if (site := through_site(modules[0])) in through:
        asked &= through[site] > 0
      kind, targets = _targets(self.read, of[0], batch, allowed, self._targets(modules))
      steep = jnp.concatenate([slopes[site] for site in of], axis=1) if slopes else None
      keys = jax.random.split(jax.random.fold_in(key, number))
      proper = (jnp.min(weights, axis=-1) >= 0) & (jnp.abs(jnp.sum(weights, axis=-1) - 1) < 1e-2)
      found[name] = {
        "distributions": jnp.sum(proper & asked[:, None]),
        **look_sums(weights, allowed, asked, targets, kind, keys[0], steep),
        **_compare(weights, asked, keys[1]),
      }
    return found

  def _gradients(
    self, params: PyTree, batch: Batch, attention: Mapping[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Gradients of the batch's loss with respect to attention; none where a model steps in time."""
    if self.subject.task.model.config.steps_through_time:
      return {}

    def loss(added: dict[str, jax.Array]) -> jax.Array:
      edits = {site: jax.tree_util.Partial(jnp.add, more) for site, more in added.items()}
      intermediates = Intermediates(edits=edits)
      logits = self.subject.task.model.forward(params, batch, intermediates=intermediates)
      return cross_entropy(logits, *self.read.targets(batch)).nll

    return jax.grad(loss)({site: jnp.zeros_like(value) for site, value in attention.items()})


def through_site(module: Module) -> str:
  """Site of the weights [batch, time] of tokens in a module's layer, 0 of those that pass it by;
  only layers of a mixture of depths have it."""
  return f"{module.name.rpartition('/')[0]}/depth/weights"


def _instead(kept: jax.Array, value: jax.Array) -> jax.Array:
  """What takes the place of an activation."""
  return kept.astype(value.dtype)


def _targets(
  read: Reader,
  site: str,
  batch: Batch,
  allowed: Bool[Array, "batch time keys"],
  names: Sequence[str],
) -> tuple[jax.Array, jax.Array]:
  """Kinds of keys [batch, keys]; which keys are which target, bool [targets, batch, time, keys]."""
  _, time, keys = allowed.shape
  prefix = f"roles/{read.key_stream(site)}/"

  def behind(values: jax.Array, fill: Any, *sizes: int) -> jax.Array:
    """Auxiliary positions in front, of which nothing is known."""
    before = [size - have for size, have in zip(sizes, values.shape[1:], strict=True)]
    return jnp.pad(values, [(0, 0), *((n, 0) for n in before)], constant_values=fill)

  kind = behind(batch[f"{prefix}kind"], KINDS.index("separator"), keys)
  rank = behind(batch[f"{prefix}rank"], jnp.inf, keys)
  relations = f"{prefix}relations/"
  related = {
    name.removeprefix(relations): behind(value, False, time, keys)
    for name, value in batch.items()
    if name.startswith(relations) and name.removeprefix(relations) in names
  }
  return kind, stack_targets(names, allowed, kind, rank, related)


def stack_targets(
  names: Sequence[str],
  allowed: Bool[Array, "batch time keys"],
  kind: Array,
  rank: Float[Array, "batch keys"],
  related: Mapping[str, Bool[Array, "batch time keys"]],
) -> Bool[Array, "targets batch time keys"]:
  """Which keys are which target for a query.

  Args:
    names: of the targets.
    allowed: which keys a query may read.
    kind: number in KINDS of every key, int [batch, keys].
    rank: how often the key's token stands in training; infinite for what is no word.
    related: name of a relation, one way -> whether the key's word is so related to the query's.
  """
  _, time, keys = allowed.shape
  offsets = jnp.arange(keys)[None] - jnp.arange(time)[:, None]
  least = jnp.min(jnp.where(allowed, rank[:, None], jnp.inf), axis=-1, keepdims=True)
  first = jnp.argmax(allowed, axis=-1)[..., None]
  known = {name: (offsets == offset)[None] for name, offset in PLACES.items()}
  known |= {
    FIRST: jnp.arange(keys)[None, None] == first,
    SEPARATOR: (kind == KINDS.index("separator"))[:, None],
    RAREST: (rank[:, None] == least) & jnp.isfinite(least),
    **related,
  }
  return jnp.stack([jnp.broadcast_to(known[name], allowed.shape) for name in names])


def look_sums(
  attention: Float[Array, "batch heads time keys"],
  allowed: Bool[Array, "batch time keys"],
  asked: Bool[Array, "batch time"],
  targets: Bool[Array, "targets batch time keys"],
  kind: Array,
  key: jax.Array,
  slopes: Float[Array, "batch heads time keys"] | None = None,
) -> Sums:
  """Sums over the queries of a batch.

  Args:
    attention: weights; rows sum to 1 over allowed keys.
    allowed: which keys a query may read.
    asked: which queries count.
    targets: which keys are which target for a query.
    kind: number in KINDS of every key, int [batch, keys].
    key: of the shuffled weights.
    slopes: gradient with respect to every weight.

  Returns:
    `queries` []; `entropy` [heads] and `limit` []; `weight` and `dealt` [kinds, heads]; in
    `targets`: `count` [targets] (queries that may read one), `hits` and `shuffled`
    [targets, heads], `chance` [targets], `offsets` [targets, 2 REACH + 1]; and with slopes
    `gradient` [kinds, heads], of absolute values, and `weights` [kinds], how many those are of.
  """
  dealt = shuffled(attention, allowed, key)
  looked, elsewhere = (
    jnp.argmax(jnp.where(allowed[:, None], weights, -1), axis=-1) for weights in (attention, dealt)
  )
  number = jnp.maximum(jnp.sum(allowed, axis=-1), 1).astype(jnp.float32)
  here = targets & allowed[None]
  possible = asked[None] & jnp.any(here, axis=-1)
  share = jnp.sum(here, axis=-1) / number[None]
  found: Sums = {
    "queries": jnp.sum(asked),
    "entropy": jnp.sum(jnp.where(asked[:, None], _entropy(attention), 0), axis=(0, 2)),
    "limit": jnp.sum(jnp.where(asked, jnp.log(number), 0)),
    "targets": {
      "count": jnp.sum(possible, axis=(1, 2)),
      "hits": _hits(looked, here, possible),
      "shuffled": _hits(elsewhere, here, possible),
      "chance": jnp.sum(jnp.where(possible, share, 0), axis=(1, 2)),
      "offsets": _at_offsets(here & possible[..., None]),
    },
  }
  kinds = jax.nn.one_hot(kind, len(KINDS), dtype=jnp.float32)
  counted = (allowed & asked[..., None]).astype(jnp.float32)
  for name, weights in (("weight", attention), ("dealt", dealt)):
    found[name] = jnp.einsum("bhtk,btk,bkc->ch", weights, counted, kinds)
  if slopes is not None:
    found["gradient"] = jnp.einsum("bhtk,btk,bkc->ch", jnp.abs(slopes), counted, kinds)
    found["weights"] = jnp.einsum("btk,bkc->c", counted, kinds)
  return found


def shuffled(
  attention: Float[Array, "batch heads time keys"],
  allowed: Bool[Array, "batch time keys"],
  key: jax.Array,
) -> Float[Array, "batch heads time keys"]:
  """Every query's weights dealt out anew to the keys that it may read, those of all heads alike."""
  random = jnp.where(allowed, jax.random.uniform(key, allowed.shape), jnp.inf)
  place = jnp.maximum(jnp.cumsum(allowed, axis=-1) - 1, 0)  # of a key among those allowed
  source = jnp.take_along_axis(jnp.argsort(random, axis=-1), place, axis=-1)
  source = jnp.broadcast_to(source[:, None], attention.shape)
  return jnp.where(allowed[:, None], jnp.take_along_axis(attention, source, axis=-1), 0)


def _hits(
  looked: Array,
  here: Bool[Array, "targets batch time keys"],
  possible: Bool[Array, "targets batch time"],
) -> jax.Array:
  """How many queries look [batch, heads, time] at a target, [targets, heads]."""

  def of_target(here: jax.Array, possible: jax.Array) -> jax.Array:
    on = jnp.take_along_axis(here[:, None], looked[..., None], axis=-1)[..., 0]
    return jnp.sum(on & possible[:, None], axis=(0, 2))

  return jax.lax.map(lambda pair: of_target(*pair), (here, possible))


def _at_offsets(here: Bool[Array, "targets batch time keys"]) -> jax.Array:
  """How many queries have a target at each fixed offset, [targets, 2 REACH + 1]."""
  _, _, time, keys = here.shape
  offsets = jnp.arange(keys)[None] - jnp.arange(time)[:, None]
  number = jnp.where(jnp.abs(offsets) <= REACH, offsets + REACH, 2 * REACH + 1)
  sums = jnp.zeros((len(here), 2 * REACH + 2), jnp.int32)
  return sums.at[:, number].add(jnp.sum(here, axis=1))[:, :-1]


def _entropy(weights: Float[Array, "*rows keys"]) -> Float[Array, "*rows"]:
  return -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1)), axis=-1)


# How alike heads are.


def jensen_shannon(
  one: Float[Array, "*rows keys"], other: Float[Array, "*rows keys"]
) -> Float[Array, "*rows"]:
  r"""Jensen-Shannon divergence in nats: 0 for equal distributions, log 2 for disjoint ones.

  .. math:: \mathrm{JS}(p, q) = H\big(\tfrac{p + q}{2}\big) - \tfrac12 H(p) - \tfrac12 H(q)

  Its mean over queries is a squared Euclidean distance, so that the root has an exact map.

  Source: Lin 1991; for heads Clark et al. 2019, section 6.
  """
  between = _entropy((one + other) / 2) - (_entropy(one) + _entropy(other)) / 2
  return jnp.maximum(between, 0)


def _compare(
  weights: Float[Array, "batch heads time keys"], asked: Bool[Array, "batch time"], key: jax.Array
) -> Sums:
  """Sums over some of the queries of the divergence of every two heads, and how many they are."""
  heads, keys = weights.shape[1], weights.shape[3]
  rows = jnp.moveaxis(weights, 1, 0).reshape(heads, -1, keys)
  order = jnp.where(asked.reshape(-1), jax.random.uniform(key, (asked.size,)), -1)
  best, chosen = jax.lax.top_k(order, min(_QUERIES, asked.size))
  rows, counts = rows[:, chosen], best >= 0
  divergence = jax.lax.map(lambda one: jensen_shannon(one[None], rows), rows)
  return {
    "divergence": jnp.sum(divergence * counts[None, None], axis=-1),
    "compared": jnp.sum(counts),
  }


def classical_scaling(distances: np.ndarray, dims: int = 2) -> np.ndarray:
  r"""Points whose distances come nearest to the given ones: classical multidimensional scaling.

  .. math:: B = -\tfrac12 J D^{2} J, \quad J = I - \tfrac1n 1 1^T, \quad
     X = V_{\mathrm{dims}} \Lambda_{\mathrm{dims}}^{1/2}

  with eigenvectors V and the largest eigenvalues of B; negative ones count as 0.

  Args:
    distances: symmetric, [points, points].
    dims: of the map.

  Returns:
    float64 [points, dims], centred.

  Source: Torgerson 1952.
  """
  squared = np.square(np.asarray(distances, np.float64))
  centred = squared - squared.mean(0, keepdims=True) - squared.mean(1, keepdims=True)
  values, vectors = np.linalg.eigh(-(centred + squared.mean()) / 2)
  chosen = np.argsort(values)[::-1][:dims]
  points = vectors[:, chosen] * np.sqrt(np.maximum(values[chosen], 0))
  return np.pad(points, ((0, 0), (0, dims - points.shape[1])))


# What a head is called.


class Role(NamedTuple):
  """What a head does, in a word.

  Attributes:
    kind: one of ROLES.
    target: what it looks at; empty for `other`.
    share: how often, in the half where it does so less.
    beyond: the share that it is held against: best fixed offset, or chance.
  """

  kind: str
  target: str = ""
  share: float = float("nan")
  beyond: float = float("nan")


def role_of(looks: Sequence[Look], head: int, *, shuffled: bool = False) -> Role:
  """The role that a head has in all passes: the first of ROLES whose rule holds.

  Positional: at least 90 % of the largest weights are at one offset, at the first token or at
  separators. Syntactic: it follows a relation at least 10 points more often than the best fixed
  offset does. Rare: at least half are at the rarest token, and twice what chance gives. A target
  that fewer than 20 queries may read says nothing.

  Source: the thresholds of Voita et al. 2019, sections 5.1 to 5.3, but for the last.

  Args:
    looks: of one module, in several passes.
    head: its number.
    shuffled: of the shuffled weights.
  """

  def least(target: str) -> tuple[float, float, float]:
    """The lowest share, and the highest of the best offset and of chance, over the passes."""
    if any(look.count(target) < _LEAST for look in looks):
      return float("nan"), float("nan"), float("nan")
    shares = [float(look.share(target, shuffled=shuffled)[head]) for look in looks]
    offsets = [look.best_offset(target)[1] for look in looks]
    return min(shares), max(offsets), max(look.chance(target) for look in looks)

  names = looks[0].names
  places = [(least(name), name) for name in (*PLACES, FIRST, SEPARATOR)]
  (share, _, chance), target = max(places, key=lambda pair: np.nan_to_num(pair[0][0], nan=-1))
  if share >= _POSITIONAL:
    return Role(ROLES[0], target, share, chance)
  syntax = [(least(name), name) for name in names if " → " in name]
  syntax = [one for one in syntax if one[0][0] >= one[0][1] + _SYNTACTIC]
  if syntax:
    (share, offset, _), target = max(syntax, key=lambda pair: pair[0][0] - pair[0][1])
    return Role(ROLES[1], target, share, offset)
  share, _, chance = least(RAREST)
  if share >= max(_RARE, 2 * chance):
    return Role(ROLES[2], RAREST, share, chance)
  return Role(ROLES[3])


# Weights of the projections.


def spectrum(query: np.ndarray, key: np.ndarray, mechanisms: int = 1) -> Spectrum:
  r"""How the squared singular values of :math:`W_Q W_K^T` add up by rank.

  A head's product has rank head_dim at most; that of all heads, [embed, embed], is the sum of
  theirs and has rank embed at most. Where mechanisms read slices of their own it has a block for
  each, and its singular values are those of all blocks. Biases are left out.

  Args:
    query: W_Q, [embed / mechanisms, heads, head_dim].
    key: W_K, [key embed / mechanisms, heads, head_dim].
    mechanisms: how many; each has as many heads, one after the other.

  Source: Cordonnier et al. 2021, section 3.1; Kolios 2023, Figure 3.8.
  """
  query, key = (np.asarray(value, np.float64) for value in (query, key))

  def squares(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    left, right = (np.asarray(np.linalg.qr(value, mode="r")) for value in (one, other))
    return np.square(np.linalg.svd(left @ right.T, compute_uv=False))

  def shares(squares: np.ndarray, ranks: int) -> np.ndarray:
    total = squares.sum()
    shares = np.cumsum(squares) / (total if total > 0 else 1)
    return np.pad(shares, (0, max(0, ranks - len(shares))), mode="edge")[:ranks]

  heads, dim = query.shape[1:]
  own = np.stack([shares(squares(query[:, head], key[:, head]), dim) for head in range(heads)])
  sides = (np.split(side.reshape(len(side), -1), mechanisms, axis=1) for side in (query, key))
  blocks = np.concatenate([squares(*pair) for pair in zip(*sides, strict=True)])
  ranks = mechanisms * min(len(query), heads // mechanisms * dim)
  return Spectrum(own, shares(np.sort(blocks)[::-1], ranks))


def spectra(subject: Subject, params: PyTree) -> dict[str, Spectrum]:
  """Module -> the spectrum of its projections, of all attention by products of queries and keys."""
  paths: dict[str, tuple[tuple[str, ...], int]] = {}

  def watch(function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    if isinstance(context.module, Attention) and context.method_name == "__call__":
      name = kwargs["ctx"].intermediates.prefix.rstrip("/")
      paths[name] = context.module.path, context.module.mechanisms
    return function(*args, **kwargs)

  def trace(params: PyTree, batch: Batch) -> None:
    with nn.intercept_methods(watch):
      subject.task.model.forward(params, batch, intermediates=Intermediates(capture=None))

  jax.eval_shape(trace, subject.params, subject.task.dataset.example())
  found = {}
  for name, (path, mechanisms) in paths.items():
    of = functools.reduce(lambda tree, part: tree[part], path, params)
    kernels = [
      np.asarray(of[part]["kernel"])  # [embed / mechanisms, heads, projections, head_dim]
      for part in ("query_key_value", "query", "key_value")
      if part in of
    ]
    query, key = kernels[0][:, :, 0], kernels[-1][:, :, 1 if len(kernels) == 1 else 0]
    found[name] = spectrum(query, key, mechanisms)
  return found


def _ratio(value: Any, count: Any) -> np.ndarray:
  return np.asarray(value) / count if count > 0 else np.full(np.shape(value), np.nan)
