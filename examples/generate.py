"""Generate text with a real model whose every attention layer runs through flexdecode.

The same ``model.generate`` call runs twice: with the model's causal mask, then with attention
sinks and a window on top, a rule of one line that no model code knows about. Then the causal
tokens are compared with those of the model's own eager attention.

Over a few hundred tokens a step's time goes into the weights, not into the cache: what the window
saves shows in the share of blocks, not in tokens per second.

Run ``python examples/generate.py``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

# Threads that wait for one another by spinning crawl when anything else runs. Read with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from model import Chat, load
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AttentionMaskInterface

from flexdecode.integrations.transformers import ModelMask, create_mask, register, restrict
from flexdecode.masks import sink_window

STORY = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had "
    "no pictures or conversations in it, and what is the use of a book, thought Alice, without "
    "pictures or conversation? So she was considering in her own mind, as well as she could, for "
    "the hot day made her feel very sleepy and stupid, whether the pleasure of making a "
    "daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly "
    "a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; "
    "nor did Alice think it so very much out of the way to hear the Rabbit say to itself, Oh dear! "
    "Oh dear! I shall be late! But when the Rabbit actually took a watch out of its "
    "waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it "
    "flashed across her mind that she had never before seen a rabbit with either a "
    "waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across "
    "the field after it, and fortunately was just in time to see it pop down a large rabbit-hole "
    "under the hedge. In another moment down went Alice after it, never once considering how in "
    "the world she was to get out again. The rabbit-hole went straight on like a tunnel for some "
    "way, and then dipped suddenly down, so suddenly that Alice had not a moment to think about "
    "stopping herself before she found herself falling down a very deep well."
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little robot who",
    "Name three colours of the rainbow.",
)
CHECKED_TOKENS = 24
BLOCK_SIZE = 32  # tokens: small, so that a few hundred tokens make several blocks


@dataclass(frozen=True)
class Step:
    """One decoded token: the keys there were, the blocks of them that were read, the time."""

    tokens: int
    read: int
    blocks: int
    seconds: float


@dataclass
class Recorder:
    """Stands between `generate` and the console: prints tokens, notes what each step read."""

    console: Console
    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    mask: ModelMask | None = None
    printed: str = ""
    since: float = 0.0

    def create_mask(self, *args: Any, **kwargs: Any) -> ModelMask:
        """Keep the mask of the forward pass that is about to run; all layers share it."""
        self.mask = create_mask(*args, **kwargs, block_size=BLOCK_SIZE)
        return self.mask

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt, then one token a call (``generate(streamer=)``)."""
        now = time.perf_counter()
        if self.mask is not None:
            self.ids.append(int(ids))
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            self.console.print(text[len(self.printed) :], end="", highlight=False, soft_wrap=True)
            self.printed = text
            if self.mask.shape[-2] == 1:  # not the prompt's own pass
                self.steps.append(step_of(self.mask, now - self.since))
        self.since = now

    def end(self) -> None:
        """Finish the line after the last token (``generate(streamer=)``)."""
        self.console.print()


def step_of(mask: ModelMask, seconds: float) -> Step:
    """Count the blocks that a step's tables list."""
    tables = mask.block_mask.tables
    read = int(tables.kv_num_blocks.sum())
    if tables.full_kv_num_blocks is not None:
        read += int(tables.full_kv_num_blocks.sum())
    tokens = mask.shape[-1]
    blocks = tables.kv_num_blocks.numel() * -(-tokens // BLOCK_SIZE)
    return Step(tokens, read, blocks, seconds)


def tell(console: Console, chat: Chat, tokens: int, rule: AbstractContextManager[None]) -> None:
    """Continue the story under `rule`, then show what the steps read."""
    recorder = Recorder(console, chat.tokenizer)
    AttentionMaskInterface.register("flexdecode", recorder.create_mask)
    inputs = chat.tokenizer(STORY, return_tensors="pt").to(chat.model.device)
    console.print(f"... {STORY[-72:]}", style="dim", end="", highlight=False, soft_wrap=True)
    with rule:
        chat.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, streamer=recorder)

    table = Table("step", "keys", "blocks read", "share", "", "tokens/s", box=None)
    for column in table.columns:
        column.justify = "right"
    table.columns[4].justify = "left"
    every = max(1, len(recorder.steps) // 6)
    for number, step in enumerate(recorder.steps, start=2):
        if (number - 2) % every == 0:
            share = step.read / step.blocks
            table.add_row(
                str(number),
                str(step.tokens),
                f"{step.read} of {step.blocks}",
                f"{share:.0%}",
                "█" * round(20 * share) + "░" * (20 - round(20 * share)),
                f"{1 / step.seconds:.1f}",
            )
    console.print()
    console.print(table)
    if recorder.steps:
        share = sum(s.read for s in recorder.steps) / sum(s.blocks for s in recorder.steps)
        rate = len(recorder.steps) / sum(s.seconds for s in recorder.steps)
        console.print(f"[bold]{share:.0%} of the key blocks read, {rate:.1f} tokens/s[/bold]\n")


def same_tokens_as_eager(console: Console, chat: Chat) -> bool:
    """Decode three left-padded prompts with both attentions and compare every token."""
    register(block_size=BLOCK_SIZE)
    last = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[-1]}], tokenize=False, add_generation_prompt=True
    )
    inputs = chat.tokenizer([*PROMPTS[:-1], last], return_tensors="pt", padding=True)
    inputs = inputs.to(chat.model.device)
    tokens, logits = {}, {}
    for implementation in ("eager", "flexdecode"):
        chat.model.set_attn_implementation(implementation)
        result = chat.model.generate(
            **inputs,
            max_new_tokens=CHECKED_TOKENS,
            min_new_tokens=CHECKED_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens[implementation] = result.sequences[:, inputs["input_ids"].shape[1] :]
        logits[implementation] = torch.stack(result.logits)
    for prompt, row in zip(PROMPTS, tokens["flexdecode"], strict=True):
        console.print(prompt, style="dim", end=" ", highlight=False, soft_wrap=True)
        text = chat.tokenizer.decode(row, skip_special_tokens=True).strip()
        console.print(text.replace("\n", " "), highlight=False, soft_wrap=True)
    same = int((tokens["eager"] == tokens["flexdecode"]).sum())
    total = tokens["eager"].numel()
    off = (logits["eager"] - logits["flexdecode"]).abs().max()
    verdict = "[bold green]equal[/]" if same == total else "[bold red]different[/]"
    console.print(
        f"\n{verdict}: {same} of {total} tokens as the model's own eager attention, "
        f"largest difference of a logit {off:.1e} (logits reach {logits['eager'].max():.0f})"
    )
    return same == total


def compare_speed(console: Console, chat: Chat, tokens: int) -> None:
    """Time the same generation through torch's SDPA and through flexdecode."""
    register(block_size=128)
    inputs = chat.tokenizer(STORY, return_tensors="pt").to(chat.model.device)
    rates = []
    for implementation in ("sdpa", "flexdecode"):
        chat.model.set_attn_implementation(implementation)
        for count in (4, tokens):  # the first compiles
            torch.cuda.synchronize()
            start = time.perf_counter()
            chat.model.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
            torch.cuda.synchronize()
        rates.append(f"{implementation} {count / (time.perf_counter() - start):.1f} tokens/s")
    console.print(f"\nThe causal story on this GPU: {', '.join(rates)}")


def main() -> int:
    """Run the demonstration; the exit status is 1 where the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each story")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that stay visible")
    parser.add_argument("--window", type=int, default=96, help="last tokens that stay visible")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    console = Console()
    start = time.perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        chat = load(options.device, report=lambda step: progress.update(task, description=step))
    register(block_size=BLOCK_SIZE)
    chat.model.set_attn_implementation("flexdecode")
    config = chat.model.config
    console.print(
        f"SmolLM2-135M-Instruct on {options.device}, ready in {time.perf_counter() - start:.1f} s: "
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} key heads, attention by flexdecode\n"
    )
    console.rule("The model's own mask: causal", align="left")
    tell(console, chat, options.tokens, contextlib.nullcontext())
    name = f"sink_window({options.sinks}, {options.window})"
    console.rule(f"The same call within restrict({name})", align="left")
    tell(console, chat, options.tokens, restrict(sink_window(options.sinks, options.window)))
    console.rule(
        f"Against eager attention: {len(PROMPTS)} prompts, left-padded, {CHECKED_TOKENS} tokens",
        align="left",
    )
    same = same_tokens_as_eager(console, chat)
    if chat.model.device.type == "cuda":
        compare_speed(console, chat, options.tokens)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
