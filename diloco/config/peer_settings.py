"""The settings of one peer: directories, hardware, way to the swarm, logs, and simulation.

The settings of the run are in `run_settings.py`, which says where presets and further checks are.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_serializer, model_validator

from diloco.config.address import is_mailbox
from diloco.config.explain import TypeHint
from diloco.config.registry import import_code
from diloco.config.types import (
    Directory,
    FileName,
    Multiaddr,
    Name,
    NotEmpty,
    PeerAddress,
    PeerLocal,
    Rate,
    Text,
    Tuple,
    Unquoted,
)


def _store_url(url: str) -> str:
    example = "one looks like s3://BUCKET/NAME, hf://buckets/ORG/NAME or file:///shared/NAME"
    if not is_mailbox(url):
        raise ValueError(f"swarm.mailbox={url} is not the URL of a store; {example}")
    if "@" in url.split("/")[2]:
        raise ValueError(
            "swarm.mailbox has a key in it, which logs show; put it where the store's"
            " library looks for one, such as ~/.aws/credentials"
        )
    return url.rstrip("/")


MailboxUrl = Annotated[str, AfterValidator(_store_url), TypeHint("the URL of a folder in a store")]


def _without_secret(url: str) -> str:
    if re.search(r"://([^/]*:[^/]*@|.*\?)", url):
        raise ValueError("checkpoint.push has a password in it, which logs show; use environment")
    return url


Seconds = Annotated[float, Field(ge=0, le=86400)]
TokenText = Annotated[
    str,
    Unquoted,
    Field(pattern=r"^(@.+|[A-Za-z0-9_-]{1,1024})$"),
    TypeHint("the token of an invitation, or @FILE with it"),
]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d{1,3})?)$"),
    TypeHint("auto, cpu, cuda[:N], xpu[:N] or mps"),
]
PushPlace = Annotated[Text, AfterValidator(_without_secret)]
SimEvent = Annotated[
    str,
    Field(pattern=r"^(crash|leave|join):\d+@\d+(\.\d+)?$"),
    TypeHint("crash:PEER@SECOND, leave:... or join:..."),
]


class PeerRunConfig(PeerLocal):
    dir: Directory = Field(description="Run directory; a run found there is resumed.")
    name: Name | None = None
    """Display name of this peer; null derives one from its identity."""
    code: Annotated[tuple[str, ...], Tuple, AfterValidator(import_code)] = ()
    """Python files of your own, imported first: they register names for other settings."""
    lead: bool = True
    """Evaluate, and write model/ and the summary; one peer of a run directory does."""
    report: bool = False
    """Write status as JSON lines on stdout, for a supervising process."""
    record: bool = False
    """Keep the last events in recording.bin, which scripts/replay plays again."""


class LocalConfig(PeerLocal):
    """`diloco local`: several peers on this machine."""

    peers: int = Field(4, ge=1, le=1024, description="Peers that `diloco local` starts.")
    step_delay_s: Annotated[tuple[Seconds, ...], Tuple] = ()
    """Seconds slept per inner step, one per peer, to stand for slow hardware; [] is none."""

    @model_validator(mode="after")
    def _one_delay_per_peer(self) -> LocalConfig:
        if len(self.step_delay_s) not in (0, self.peers):
            problem = f"{len(self.step_delay_s)} values for local.peers={self.peers}"
            raise ValueError(f"local.step_delay_s has {problem}; give one per peer or []")
        return self


class SimConfig(PeerLocal):
    """`diloco simulate`: the simulated time and network."""

    step_s: Annotated[tuple[Seconds, ...], Tuple, NotEmpty] = Field((1.0,))
    """Virtual seconds of an inner step, one for all peers or one per peer."""
    jitter: float = Field(0.0, ge=0, le=2)
    """Random spread of each inner step's seconds: they are multiplied by exp(N(0, jitter))."""
    bandwidth: Rate | None = None
    """Bandwidth of each peer's link, each way; null is no limit."""
    latency_s: float = Field(0.0, ge=0, le=60, description="Seconds on the way from peer to peer.")
    loss: float = Field(0.0, ge=0, lt=1, description="Chance that a bulk stream breaks.")
    events: Annotated[tuple[SimEvent, ...], Tuple] = ()
    """What happens when, such as crash:3@120, leave:1@90, join:4@60 (peer @ virtual second)."""


class PeerSwarmConfig(PeerLocal):
    """The addresses and keys by which this peer finds the others and is found."""

    initial_peers: Annotated[tuple[PeerAddress, ...], Tuple] = ()
    """Addresses of peers of the swarm to join; [] starts a new swarm."""
    mailbox: MailboxUrl | None = None
    """URL of a store's folder through which peers exchange objects: hf://buckets/ORG/NAME."""
    listen: Annotated[tuple[Multiaddr, ...], Tuple, NotEmpty] = Field(("/ip4/127.0.0.1/tcp/0",))
    """Multiaddrs to listen on; port 0 is any free port."""
    bulk_port: int | None = Field(None, ge=0, le=65535)
    """TCP port for tensors, past the daemon: null is the one after swarm.listen's, 0 any."""
    announce: Annotated[tuple[Multiaddr, ...], Tuple] = ()
    """Multiaddrs to tell others, if they differ from swarm.listen (NAT, forwarded ports)."""
    reachable: Literal["auto", "yes", "no"] = "auto"
    """Whether others can connect; auto: one of them tries. no: it trains and holds nothing."""
    identity_path: FileName | None = None
    """File with this peer's private key, made if missing; null is a new identity."""
    token: TokenText | None = Field(None, repr=False)
    """Invitation of this peer to a closed run, or @FILE with it; it is a secret."""
    key_path: FileName | None = None
    """File with the run's private key, for its owner: this peer invites itself."""
    min_peers: int = Field(1, ge=1, le=100_000)
    """Peers, this one included, that must be there before inner step 1."""
    upload_limit: Rate | None = None
    """Most payload that this peer sends; null is no limit."""
    heartbeat_s: float = Field(1.0, gt=0, le=60, description="Seconds between signs of life.")
    inner_state: Literal["donor", "cold"] = "donor"
    """A joiner's inner optimizer state: a donor's, or none (cold: its first round is left out)."""

    @property
    def donors(self) -> tuple[str, ...]:
        """Places to ask for the run: addresses of peers, or the mailbox."""
        return self.initial_peers or ((self.mailbox,) if self.mailbox else ())

    @model_validator(mode="after")
    def _only_tcp(self) -> PeerSwarmConfig:
        for address in (*self.listen, *self.announce):
            if "/udp/" in address:
                key = "listen" if address in self.listen else "announce"
                tcp = re.sub("/udp/([^/]*).*", r"/tcp/\1", address)
                why = f"swarm.{key}={address} is QUIC, whose library here has known holes"
                raise ValueError(f"{why}; write {tcp}")
        return self

    @field_serializer("token", when_used="json")
    def _keep_secret(self, token: str | None) -> str | None:
        """Keep a token out of config.yaml and logs: they name its file only."""
        return token if token is not None and token.startswith("@") else None


class TrainConfig(PeerLocal):
    """The hardware of this peer."""

    device: Device = "auto"
    """auto is the first accelerator, or each process's own under torchrun, else the CPU."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Of several ranks: the model in each, or rows."""
    micro_batch: int | None = Field(None, ge=1, le=1 << 20)
    """Sequences computed at a time; null takes the batch whole, or what fits."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of the trainer; null shares the cores."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of inner steps; weights stay fp32. auto: bf16 or else fp16 on CUDA, fp32 on a CPU."""
    base: Literal["auto", "fp32", "nf4"] = "auto"
    """The frozen base of an adapter, in memory. auto: as precision; nf4: in 4 bits (QLoRA)."""
    tf32: bool = True
    """On CUDA, fp32 matrix products from inputs rounded to TF32."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """How attention is computed; auto: as transformers does. flash_attention_2 needs flash_attn."""
    checkpointing: bool = False
    """Recompute each layer going backward: less memory, a third slower."""
    compile: bool = False
    """Compile the model's layers: a slow first step, then faster ones."""
    step_delay_s: Seconds = 0.0
    """Seconds slept per inner step, to stand for slow hardware."""
    log_every: int = Field(10, ge=1)
    """Inner steps between lines with the loss in metrics.jsonl."""


class CheckpointConfig(PeerLocal):
    every: int = Field(1, ge=0)
    """Outer steps between checkpoints; 0 is only at the end."""
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones are deleted.")
    background: bool = True
    """Written from copies while training goes on; false: no copies, and training waits."""
    push: PushPlace | None = None
    """Directory or URL (s3://, gs://, az://, hf://) for each checkpoint's model."""


class EvalConfig(PeerLocal):
    every: int = Field(1, ge=0)
    """Outer steps between evaluations on held-out text; 0 is only at the end."""
    sequences: int = Field(64, ge=1, description="Held-out sequences of one evaluation.")
    prompts: Annotated[
        tuple[str, ...], Tuple, Field(max_length=16), TypeHint("a list of texts, at most 16")
    ] = ()
    """Texts that the model continues at an evaluation (events `sample`, page, wandb)."""
    prompt_tokens: int = Field(64, ge=1, le=1024)
    """Most tokens that it writes after each of eval.prompts."""


class WandbConfig(PeerLocal):
    mode: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases logging; where it is on, the variable WANDB_MODE wins."""
    project: Text = Field("diloco", description="wandb project.")
    entity: Text | None = Field(None, description="wandb team or user; null is your default.")
    aggregate: bool = False
    """Log the whole swarm as one run, as this peer sees it, instead of a run per peer."""
