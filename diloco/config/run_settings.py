"""The settings that define a run, one class per group, and the checks inside a group.

`RunConfig` adds what each peer decides for itself, from `peer_settings.py`; model and data are in
`model_data.py`. Values that make a preset live in `configs/`; a default here suits every preset.
Checks across groups are in `schema.py` and, for the run-owned half, in `manifest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, field_validator, model_validator
from pydantic_core import PydanticCustomError

from diloco.config.explain import TypeHint
from diloco.config.peer_settings import PeerRunConfig, PeerSwarmConfig
from diloco.config.registry import (
    OUTER_OPTIMIZERS,
    CodecDown,
    CodecUp,
    InnerName,
    MergeName,
    OptimizerName,
)
from diloco.config.types import Name, RunOwned, Tuple
from diloco.protocol import Schedule


def _steps_or_part(value: float) -> float:
    if value > 1 and value % 1:
        raise PydanticCustomError("format", "neither a whole number nor a part")
    # 25 and 25.0 are one setting, with one text in the manifest
    return value if 0 < value < 1 else int(value)


StepsOrPart = Annotated[
    float,
    AfterValidator(_steps_or_part),
    PlainSerializer(lambda value: value),  # a serializer of floats would write 25 as 25.0
    TypeHint("a whole number of steps, or a part below 1"),
]
RunKeyText = Annotated[
    str,
    Field(pattern=r"^[0-9a-f]{64}$"),
    TypeHint("64 hexadecimal digits, as diloco keygen prints them"),
]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RunIdentity(RunOwned):
    id: Name = Field(description="Name of the run; peers of another run are refused.")
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data."""
    key: RunKeyText | None = None
    """Public key of a run whose versions only invited peers make; null: all who reach it do."""


KEYLESS = (
    "swarm.admit=anyone: a run without a key is open to all, and all make its versions; make a key"
    " by diloco keygen run.key and add swarm.key_path=run.key, or drop it"
)


class SwarmRules(RunOwned):
    admit: Literal["invited", "anyone"] = "invited"
    """Who may contribute to a run with a key; only invited peers make its versions."""


class SwarmConfig(PeerSwarmConfig, SwarmRules):
    """The addresses and keys by which peers find each other, and the rule of admission."""


class RunConfig(PeerRunConfig, RunIdentity):
    """The identity of the run, and its directory on this peer."""


class BudgetConfig(RunOwned):
    """The end of the run: the first limit reached. A restart with greater limits raises them."""

    outer_steps: int | None = Field(None, ge=1, le=10**15)
    """Outer steps after which the run ends; null is no limit."""
    tokens: int | None = Field(None, ge=1, le=10**18)
    """Tokens of all peers after which the run ends; null is no limit."""

    @model_validator(mode="after")
    def _ends(self) -> BudgetConfig:
        if self.outer_steps is None and self.tokens is None:
            both = "budget.outer_steps and budget.tokens are both null"
            raise ValueError(f"{both}, so the run would never end; set one")
        return self

    def is_used_up(self, outer_steps: int, tokens: int) -> bool:
        """Return True if a limit is reached after so many outer steps and applied tokens."""
        steps_over = self.outer_steps is not None and outer_steps >= self.outer_steps
        return steps_over or (self.tokens is not None and tokens >= self.tokens)


class InnerConfig(RunOwned):
    """The optimizer that every peer runs on its own batches."""

    omitted_at_default = ("decay_ratio",)
    optimizer: InnerName = "adamw"
    """The inner optimizer; its state is never averaged. muon: on matrices inside the model."""
    lr: float = Field(gt=0, le=10, description="Peak learning rate of AdamW.")
    muon_lr_ratio: float = Field(1.0, gt=0, le=100)
    """Peak learning rate of all parameters over inner.lr, where Muon is inside (muon)."""
    batch_size: int = Field(ge=1, le=1 << 20, description="Sequences per inner step and peer.")
    betas: Annotated[tuple[Beta, Beta], Tuple] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    weight_decay: float = Field(0.1, ge=0, le=10, description="Decoupled weight decay.")
    clip: float = Field(1.0, gt=0, le=1e6)
    """Largest norm of the gradient; a larger one is scaled down."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up; wsd: constant, then linear to its end."""
    warmup_steps: StepsOrPart = Field(0, ge=0, le=10**15)
    """Inner steps in which the learning rate rises to its peak; below 1: this part of the run."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Last learning rate as a part of the peak."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """Last part of the run, in which the rate falls (wsd)."""

    @property
    def peak_lr(self) -> float:
        return self.lr * (self.muon_lr_ratio if self.optimizer == "muon" else 1.0)


class OuterConfig(RunOwned, Schedule):
    """The outer step, every `sync_every` inner steps. Its properties say which mode a run is in."""

    method: Literal["diloco", "data_parallel"]
    """diloco: pseudo-gradients and outer steps; data_parallel: gradients in every inner step."""
    sync_every: int = Field(ge=1, le=1 << 30)
    """H, inner steps per outer step (with data_parallel: per evaluation and budget step)."""
    fragments: int = Field(1, ge=1, le=65536)
    """Parts of the model, each with an author of its own."""
    pattern: Literal["contiguous", "strided"] = "contiguous"
    """contiguous: fragments of equal size; strided: whole layers, dealt round-robin."""
    staggered: bool = False
    """Fragments are due one after another, sync_every/fragments steps apart."""
    overlap: int = Field(0, ge=0, le=1 << 20)
    """Inner steps from sending a pseudo-gradient to adopting the update; below `sync_every`."""
    mixing: float = Field(0.0, ge=0, lt=1)
    """Part of the local parameters that is kept when an update is adopted."""
    quorum: int | None = Field(None, ge=1, le=100_000)
    """Contributions that close a version; null waits for every live peer."""
    grace_s: float = Field(0.0, ge=0, le=86400)
    """Seconds that the others have once the quorum is there."""
    grace_slack: float = Field(0.0, ge=0, lt=1)
    """Instead of grace_s: this part of what outer.overlap leaves to wait for others."""
    staleness_exponent: float = Field(0.0, ge=0, le=10)
    """With a quorum, a contribution s versions late counts (1 + s) ** -staleness_exponent."""
    weights: Literal["tokens", "uniform", "tokens2_per_step"] = "tokens"
    """What a contribution weighs in the mean."""
    merge: MergeName = "mean"
    """mean: weighted mean; rda: mean direction with the mean norm, piece by piece."""
    flatten: float = Field(0.0, ge=0, le=1)
    """How far singular values of each merged matrix are evened out: 0 not at all, 1 all equal."""
    robust: Literal["clip", "none"] = "clip"
    """clip: long contributions are shortened, reversed ones left out; none: all count as is."""
    clip_factor: float = Field(3.0, ge=1, le=1e6)
    """Times the median norm that a contribution may have (robust: clip)."""
    optimizer: OptimizerName = "nesterov"
    """nesterov: a step per version; delayed_nesterov: momentum once in `delay` contributions."""
    lr: float = Field(0.75, gt=0, le=10, description="Outer (Nesterov) learning rate.")
    lr_by_peers: dict[str, float] = Field(default_factory=dict)
    """Learning rates by number of contributors, such as {1: 0.4, 8: 0.8}."""
    momentum: float = Field(0.7, ge=0, lt=1)
    """Outer (Nesterov) momentum, once it has risen."""
    momentum_warmup: int | None = Field(None, ge=0, le=10**9)
    """Outer steps in which the momentum rises to its value; null: all of `rounds`."""
    rounds: int | None = Field(None, ge=1, le=10**15)
    """Outer steps that are planned, over which the momentum rises; null: with the run's age."""
    delay: int | None = Field(None, ge=1, le=100_000)
    """Contributions per momentum step; null is the number of active peers."""
    delay_c: float = Field(0.0, ge=0, le=1)
    """Part of the momentum in each of these contributions (c)."""
    dylu: bool = False
    """Slower peers take fewer inner steps, so that all exchange at one rate."""
    error_feedback: float = Field(0.0, ge=0, le=1)
    """Decay of what codec_up lost and is sent in later rounds; 0 forgets it."""
    codec_up: CodecUp = Field("int8", description="Encoding of peers' pseudo-gradients.")
    codec_down: CodecDown = Field("int8", description="Encoding of the updates of authors.")

    @property
    def windowed(self) -> bool:
        """True if a momentum step belongs to `delay` contributions, rather than to a version."""
        return OUTER_OPTIMIZERS.traits[self.optimizer]

    @field_validator("lr_by_peers", mode="before")
    @classmethod
    def _keys_are_text(cls, rates: Any) -> Any:
        return {str(peers): lr for peers, lr in rates.items()} if isinstance(rates, dict) else rates

    @model_validator(mode="after")
    def _consistent(self) -> OuterConfig:
        for wrong, text in (*_problems_of_rounds(self), *_problems_of_updates(self)):
            if wrong:
                raise ValueError(text)
        return self


Problems = Iterator[tuple[object, str]]  # (it is a problem, text)


def _problems_of_rounds(outer: OuterConfig) -> Problems:
    """Check when contributions are due, and which ones a version waits for."""
    every, overlap, fragments = outer.sync_every, outer.overlap, outer.fragments
    text = f"outer.overlap={overlap} is not less than outer.sync_every={every}; lower it"
    yield overlap >= every, text
    text = f"outer.fragments={fragments} cannot be staggered over outer.sync_every={every}"
    yield outer.staggered and fragments > every, f"{text} inner steps; lower it"
    grace, slack = f"outer.grace_s={outer.grace_s}", f"outer.grace_slack={outer.grace_slack}"
    needs = "needs a quorum after which it begins; set outer.quorum"
    yield outer.grace_s and outer.barrier, f"{grace} {needs}"
    yield outer.grace_slack and outer.barrier, f"{slack} {needs}"
    both = outer.grace_s and outer.grace_slack
    yield both, f"{grace} excludes {slack}; set one of them to 0"
    alone = outer.grace_slack and not overlap
    yield alone, f"{slack} is a part of outer.overlap, which is 0; set outer.overlap"
    text = "outer.dylu=true needs peers that do not wait for each other"
    waits = outer.staggered or outer.barrier
    yield outer.dylu and waits, f"{text}; set outer.quorum, and outer.staggered=false"


def _problems_of_updates(outer: OuterConfig) -> Problems:
    """Check the weights of contributions, and the making of a version."""
    momentum, delay, delay_c = outer.momentum, outer.delay, outer.delay_c
    text = f"outer.momentum={momentum} does not go with outer.codec_up=topk"
    yield outer.codec_up == "topk" and momentum, f"{text}; set outer.momentum=0"
    text = f"outer.delay_c={delay_c} is over 1/{delay}, one part of outer.delay; lower it"
    yield delay is not None and delay_c * delay > 1, text
    text = f"outer.delay={delay} has no effect with outer.optimizer={outer.optimizer}; drop it"
    yield delay is not None and not outer.windowed, text
    for peers, lr in outer.lr_by_peers.items():
        wrong = not peers.isdigit() or int(peers) < 1 or not 0 < lr <= 10
        text = f"outer.lr_by_peers has {peers}: {lr}"
        yield wrong, f"{text}; expected a number of peers and a learning rate up to 10"
