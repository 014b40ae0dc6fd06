"""Train and evaluate the small demo model (Qwen3 architecture, byte-level tokenizer, five tasks).

Usage:
    python scripts/train_demo_model.py --out tp_engine/demo_model --minutes 45 --seed 1
    python scripts/train_demo_model.py --out tp_engine/demo_model --evaluate

Positions need no random offset: rotary embeddings only see distances, and the rows of the training
batches are conversations of many turns, so that tasks occur at every depth of the context.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from demo_tasks import EVALUATIONS, QUICK, TASK_WEIGHTS, Turn, conversation, held_out_dialogs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
ROLE_TOKENS = ("system\n", "user\n", "assistant\n")
END_OF_TEXT, IM_START, IM_END, PAD = 256, 257, 258, 259
ROLE_IDS = {"system": 260, "user": 261, "assistant": 262}
VOCAB_SIZE = 263
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MAX_LENGTH = 1024
BUCKETS = (64, 128, 256, 512, 1024)
BUCKET_WEIGHTS = (0.27, 0.27, 0.25, 0.13, 0.08)
EMA_DECAY = 0.99


def byte_symbols() -> list[str]:
    """Return the printable symbol of each byte value, as the byte-level pre-tokenizer writes it."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(value) if value in visible else chr(next(hidden)) for value in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: token id = byte value, then the special tokens and the role lines."""
    vocab = {symbol: value for value, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ROLE_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return a freshly initialised model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        initializer_range=0.04,
    )
    return Qwen3ForCausalLM(config)


def encode_conversation(system: str | None, turns: list[Turn]) -> tuple[list[int], list[float]]:
    """Return token ids and loss weights (zero outside the replies; long replies weigh less per token)."""
    ids: list[int] = []
    weights: list[float] = []

    def add(tokens: list[int], weight: float) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))

    if system is not None:
        add([IM_START, ROLE_IDS["system"], *system.encode(), IM_END, 10], 0.0)
    for user, reply in turns:
        add([IM_START, ROLE_IDS["user"], *user.encode(), IM_END, 10, IM_START, ROLE_IDS["assistant"]], 0.0)
        answer = [*reply.encode(), IM_END]
        add(answer, 1.0 / math.sqrt(len(answer)))
        add([10], 0.0)
    return ids, weights


def make_batch(
    rng: random.Random,
    tokens: int,
    longest: int = MAX_LENGTH,
    recall_share: float = TASK_WEIGHTS["recall"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and loss weights of one batch whose rows all have about one bucket's length."""
    length = min(longest, rng.choices(BUCKETS, BUCKET_WEIGHTS)[0])
    ids = torch.full((tokens // length, length), PAD)
    weights = torch.zeros(ids.shape)
    for row in range(len(ids)):
        row_ids, row_weights = encode_conversation(*conversation(rng, length, recall_share))
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        weights[row, : len(row_ids)] = torch.tensor(row_weights)
    return ids, weights


def weighted_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the reply tokens; padding is on the right, so no mask is needed."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        target_weights = weights[:, 1:]
        chosen = target_weights > 0
        logits = model.lm_head(hidden[:, :-1][chosen])
    losses = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    kept = target_weights[chosen]
    return (losses * kept).sum() / kept.sum()


@dataclass
class Progress:
    """What a resumed run needs besides the tensors: steps and time over all stages."""

    step: int = 0
    seconds: float = 0.0
    best: float = 0.0


def build_optimizers(model: Qwen3ForCausalLM, rate: float, muon: bool) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}]
    if not muon:
        groups.append({"params": matrices, "weight_decay": 0.05})
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    if not muon:
        return [adamw]
    return [adamw, torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")]


class Trainer:
    """Model, optimizer, averaged weights and the schedule of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Build everything from the seed, or load the state file when resuming."""
        self.args = args
        self.model = build_model(args.seed)
        self.optimizers = build_optimizers(self.model, args.lr, args.muon)
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.progress = Progress()
        if args.resume and args.state.exists():
            state = torch.load(args.state, weights_only=True)
            self.model.load_state_dict(state["model"])
            if len(state["optimizers"]) == len(self.optimizers):  # else this stage has another optimizer
                for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(values)
            self.average = state["average"]
            self.progress = Progress(*state["progress"])
        self.stage = Progress(self.progress.step, self.progress.seconds)

    def fraction(self) -> float:
        """Return how much of this stage's step and time budget is used (0 to 1)."""
        steps = self.progress.step - self.stage.step
        seconds = self.progress.seconds - self.stage.seconds
        by_steps = steps / self.args.steps if self.args.steps else 0.0
        by_time = seconds / (60.0 * self.args.minutes) if self.args.minutes else 0.0
        return max(by_steps, by_time)

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine from the peak down to `final_lr` times the peak."""
        warm = min(1.0, (self.progress.step - self.stage.step + 1) / self.args.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, self.fraction())))
        return float(self.args.lr * warm * (self.args.final_lr + (1.0 - self.args.final_lr) * cosine))

    def step(self) -> float:
        """Make one optimizer step; the batch depends on the seed and the step number only."""
        started = time.monotonic()
        rng = random.Random(f"{self.args.seed}/{self.progress.step}")
        ids, weights = make_batch(rng, self.args.batch_tokens, self.args.longest, self.args.recall_share)
        loss = weighted_loss(self.model, ids, weights)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        decay = min(EMA_DECAY, self.progress.step / (self.progress.step + 10.0))
        for name, value in self.model.state_dict().items():
            self.average[name].lerp_(value, 1.0 - decay)
        self.progress.seconds += time.monotonic() - started
        return float(loss.detach())

    def averaged_model(self) -> Qwen3ForCausalLM:
        """Return a model of the averaged weights, rounded to bfloat16 as they are stored."""
        model = build_model(self.args.seed)
        model.load_state_dict(self.average)
        return model.to(torch.bfloat16).eval()

    def save_state(self) -> None:
        """Write the state file for --resume."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average,
            "progress": astuple(self.progress),
        }
        partial = self.args.state.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.args.state)


def save_folder(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the checkpoint folder, each file replaced as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as folder:
        model.generation_config = GenerationConfig(
            eos_token_id=[IM_END, END_OF_TEXT],
            pad_token_id=PAD,
            do_sample=False,
        )
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        settings_path = Path(folder) / "tokenizer_config.json"
        settings = json.loads(settings_path.read_text())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # older versions of transformers know it too
        settings_path.write_text(json.dumps(settings, indent=2) + "\n")
        for path in sorted(Path(folder).iterdir()):
            os.chmod(path, 0o644)
            os.replace(path, out / path.name)


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, dialogs: list[list[dict[str, str]]]) -> list[str]:
    """Answer dialogs greedily in left-padded batches."""
    texts = [tokenizer.apply_chat_template(d, tokenize=False, add_generation_prompt=True) for d in dialogs]
    answers: list[str] = []
    for start in range(0, len(texts), 50):
        chunk = texts[start : start + 50]
        batch = tokenizer(chunk, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=112,
            do_sample=False,
            eos_token_id=IM_END,
            pad_token_id=PAD,
        )
        answers += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def evaluate(
    model: Any,
    tokenizer: Any,
    count: int,
    show_wrong: int = 0,
    names: Iterable[str] = EVALUATIONS,
) -> dict[str, float]:
    """Return the share of exactly right replies per evaluation."""
    model.eval()
    scores = {}
    for name in names:
        dialogs = list(held_out_dialogs(name, count))
        given = replies(model, tokenizer, [messages for messages, _ in dialogs])
        wrong = [(m[-1]["content"], g, e) for (m, e), g in zip(dialogs, given, strict=True) if g != e]
        for content, got, expected in wrong[:show_wrong]:
            print(f"  {name}: {content!r} -> {got!r}, expected {expected!r}")
        scores[name] = 1.0 - len(wrong) / count
    return scores


def evaluate_folder(folder: Path, count: int, show_wrong: int) -> None:
    """Print the accuracy of the stored weights, computed in float32 and in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tables = []
    for dtype in (torch.float32, torch.bfloat16):
        print(f"evaluating in {dtype}, {count} held-out samples each")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tables.append(evaluate(model, tokenizer, count, show_wrong))
    print(f"| {'task':<20} | fp32    | bf16    |\n|{'-' * 22}|---------|---------|")
    for name in EVALUATIONS:
        print(f"| {name:<20} | {tables[0][name]:7.2%} | {tables[1][name]:7.2%} |")


def checkpoint(trainer: Trainer, samples: int) -> None:
    """Evaluate the averaged weights and store them when they are at least as good as the stored ones."""
    model = trainer.averaged_model()
    scores = evaluate(model.float(), build_tokenizer(), samples, names=QUICK)
    mean = sum(scores.values()) / len(scores)
    print(
        f"step {trainer.progress.step}: mean accuracy {mean:.3f}: "
        + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()),
        flush=True,
    )
    if mean >= trainer.progress.best - 0.02:  # few samples are noisy: near a tie, keep the newer weights
        trainer.progress.best = mean
        save_folder(model.to(torch.bfloat16), trainer.args.out)
    trainer.save_state()


def train(args: argparse.Namespace) -> None:
    """Train until the step or time budget is used up, with a checkpoint every few minutes."""
    trainer = Trainer(args)
    recent: list[float] = []
    last_checkpoint = time.monotonic()
    while trainer.fraction() < 1.0:
        recent.append(trainer.step())
        if trainer.progress.step % 50 == 0:
            print(
                f"step {trainer.progress.step} loss {sum(recent) / len(recent):.4f} "
                f"lr {trainer.learning_rate():.2e} seconds {trainer.progress.seconds:.0f}",
                flush=True,
            )
            recent.clear()
        if time.monotonic() - last_checkpoint > 60 * args.checkpoint_minutes:
            checkpoint(trainer, 20)
            last_checkpoint = time.monotonic()
    checkpoint(trainer, 40)


def main() -> None:
    """Parse the command line, then train and evaluate, or only evaluate."""
    parser = argparse.ArgumentParser(description="Train or evaluate the demo model.")
    parser.add_argument("--out", type=Path, default=Path("tp_engine/demo_model"), help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=0, help="step budget of this stage (0: none)")
    parser.add_argument("--minutes", type=float, default=0.0, help="time budget of this stage (0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--final-lr", type=float, default=0.02, help="last learning rate over the peak")
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    parser.add_argument("--longest", type=int, default=MAX_LENGTH, help="longest training row")
    parser.add_argument("--recall-share", type=float, default=TASK_WEIGHTS["recall"])
    parser.add_argument("--muon", action="store_true", help="Muon for the matrices of the layers")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-minutes", type=float, default=6.0)
    parser.add_argument("--resume", action="store_true", help="continue from the state file")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "demo_model_state.pt")
    parser.add_argument("--evaluate", action="store_true", help="only measure the stored checkpoint")
    parser.add_argument("--samples", type=int, default=200, help="held-out samples per task for --evaluate")
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong replies to print per task")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.evaluate:
        if not args.steps and not args.minutes:
            args.steps = 6000
        train(args)
    evaluate_folder(args.out, args.samples, args.show_wrong)


if __name__ == "__main__":
    main()
