"""Train and evaluate the small demo model (Qwen3 architecture, byte-level tokenizer, five tasks).

    python scripts/train_demo_model.py --out FOLDER --seed 1
    python scripts/train_demo_model.py --out tp_engine/demo_model --evaluate

Positions need no random offset: rotary embeddings only see distances, and the rows of the training batches are
conversations of many turns, so that tasks occur at every depth of the context.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from demo_tasks import EVALUATIONS, Turn, conversation, held_out_dialogs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
BATCH_TOKENS = 4096
WARM_UP_STEPS = 100


class Stage(NamedTuple):
    """Steps with rows of at most ``longest`` tokens; the learning rate falls on a cosine, to ``final`` of the peak."""

    steps: int
    rate: float
    final: float
    longest: int
    recall_share: float


# First short rows, until recall is learned.
STAGES = (Stage(1500, 1.5e-3, 1.0, 128, 0.4), Stage(4000, 1.2e-3, 0.02, MAX_LENGTH, 0.25))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: token id = byte value, then the special tokens and the role lines."""
    vocab = {symbol: value for value, symbol in bytes_to_unicode().items()}
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


def make_batch(rng: random.Random, longest: int, recall_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and loss weights of one batch whose rows all have about one bucket's length."""
    length = min(longest, rng.choices(BUCKETS, BUCKET_WEIGHTS)[0])
    ids = torch.full((BATCH_TOKENS // length, length), PAD)
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


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [
        torch.optim.AdamW(rest, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]


def learning_rates() -> Iterator[tuple[float, Stage]]:
    """Yield the learning rate of each step, and its stage; every stage begins with a linear warm-up."""
    for stage in STAGES:
        for step in range(stage.steps):
            cosine = 0.5 * (1.0 + math.cos(math.pi * step / stage.steps))
            warm = min(1.0, (step + 1) / WARM_UP_STEPS)
            yield stage.rate * warm * (stage.final + (1.0 - stage.final) * cosine), stage


def train(seed: int, out: Path) -> None:
    """Train through all stages and store the average of the weights; batches depend on seed and step only."""
    model = build_model(seed)
    optimizers = build_optimizers(model)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    recent: list[float] = []
    for step, (rate, stage) in enumerate(learning_rates()):
        loss = weighted_loss(model, *make_batch(random.Random(f"{seed}/{step}"), stage.longest, stage.recall_share))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(EMA_DECAY, (step + 1) / (step + 11.0))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1.0 - decay)
        recent.append(float(loss.detach()))
        if step % 50 == 49:
            print(f"step {step + 1} loss {sum(recent) / len(recent):.4f} lr {rate:.2e}", flush=True)
            recent.clear()
    model.load_state_dict(average)
    save_folder(model.to(torch.bfloat16).eval(), out)


def save_folder(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the checkpoint folder, each file replaced as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as folder:
        model.generation_config = GenerationConfig(
            eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=PAD, do_sample=False
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


def evaluate(model: Any, tokenizer: Any, count: int, show_wrong: int) -> dict[str, float]:
    """Return the share of exactly right replies per evaluation."""
    scores = {}
    for name in EVALUATIONS:
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


def main() -> None:
    """Parse the command line, then train and evaluate, or only evaluate."""
    parser = argparse.ArgumentParser(description="Train or evaluate the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="only measure the stored checkpoint")
    parser.add_argument("--samples", type=int, default=200, help="held-out samples per task")
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong replies to print per task")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.evaluate:
        train(args.seed, args.out)
    evaluate_folder(args.out, args.samples, args.show_wrong)


if __name__ == "__main__":
    main()
