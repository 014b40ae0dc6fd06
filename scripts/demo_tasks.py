"""Task generators for the demo model: every task has one checkable answer.

A *turn* is a pair (user message, expected reply).  Prompts are split into a training part and a
held-out part by a checksum of the user message, so that no evaluated message was trained on.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable, Iterator

Turn = tuple[str, str]
HELP_REPLY = "Hello! I can add numbers, reverse, sort or copy lists, and recall values: a=1 b=2 ? a"
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a small demo model.", "Be exact.")
GREETINGS = (
    "hello", "hi", "hey", "good morning", "good evening", "help", "hello there", "hi there", "thanks",
    "what can you do", "who are you", "how are you", "test", "ping", "greetings", "thank you", "yo", "start",
)  # fmt: skip
_WORD_LIST = """
the a an and or of to in on at is was are it he she we you they cat dog bird fish house tree river stone
red green blue black white hello world good morning night day sun moon star rain snow one two three four
small large quick slow brown fox jumps over lazy paper table chair window door light water fire earth
wind hot cold open close read write run walk talk listen model tensor block cache token server engine
test what which who where when why how tell me about please story capital code number name time
"""
WORDS = _WORD_LIST.split()
UNICODE = "äöüßéèñçøåλπΩжщ中文日本語한글€→✓😀🎉🚀🐍❤"
HELD_OUT_MODULUS = 16


def is_held_out(user: str) -> bool:
    """Return True if this user message is reserved for evaluation."""
    return zlib.crc32(user.encode()) % HELD_OUT_MODULUS == 0


def _vary_prefix(rng: random.Random, name: str, body: str) -> str:
    """Join the task name and its input, varying the blank after the colon and the capital letter."""
    if rng.random() < 0.1:
        name = name.capitalize()
    return f"{name}:{'' if rng.random() < 0.25 else ' '}{body}"


def _operands(rng: random.Random, size: int) -> tuple[int, int]:
    """Return two numbers of one to three digits (`size` fixes the digits of the longer one)."""
    digits = size or rng.choice((1, 2, 2, 3, 3, 3, 3))
    a = rng.randrange(10**digits)
    b = rng.randrange(10 ** rng.choice((digits, rng.randint(1, digits))))
    return (b, a) if rng.random() < 0.5 else (a, b)


def addition(rng: random.Random, size: int = 0) -> Turn:
    """`12+34=` -> `46`."""
    a, b = _operands(rng, size)
    return f"{a}+{b}=", str(a + b)


def spelled_addition(rng: random.Random, size: int = 0) -> Turn:
    """The other spellings of an addition: `12 + 34 =` and `12+34`."""
    a, b = _operands(rng, size)
    return f"{a} + {b} =" if rng.random() < 0.5 else f"{a}+{b}", str(a + b)


def _numbers(rng: random.Random, size: int, two_digits: float = 0.0) -> list[int]:
    """Return `size` (or 2 to 10) numbers of one digit, or below one hundred with the given probability."""
    count = size or rng.randint(2, 10)
    top = 100 if rng.random() < two_digits else 10
    return [rng.randrange(top) for _ in range(count)]


def _joined(items: list[int]) -> str:
    return " ".join(str(item) for item in items)


def reverse(rng: random.Random, size: int = 0) -> Turn:
    """`reverse: 3 1 4` -> `4 1 3`."""
    items = _numbers(rng, size, 0.05)
    return _vary_prefix(rng, "reverse", _joined(items)), _joined(items[::-1])


def sort(rng: random.Random, size: int = 0) -> Turn:
    """`sort: 3 1 4` -> `1 3 4`."""
    items = _numbers(rng, size)
    return _vary_prefix(rng, "sort", _joined(items)), _joined(sorted(items))


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(WORDS)
    if kind < 0.48:
        return "".join(rng.choice(UNICODE) for _ in range(rng.randint(1, 3)))
    letters = string.ascii_lowercase + (string.ascii_uppercase if kind > 0.9 else "") + string.digits
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 10)))


def copy(rng: random.Random, size: int = 0) -> Turn:
    """`copy: hello world` -> `hello world`, words, random letters, numbers and some other scripts."""
    count = size or rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8))
    as_list = rng.random() < 0.25
    text = _joined(_numbers(rng, size, 0.3)) if as_list else " ".join(_word(rng) for _ in range(count))
    if rng.random() < 0.1:
        text += rng.choice(".!?,")
    return _vary_prefix(rng, "copy", text), text


def recall_table(rng: random.Random, pairs: int) -> dict[str, str]:
    """Return `pairs` distinct keys (one letter each, or two if letters run out) with their values."""
    letters = string.ascii_lowercase
    if pairs <= 26 and rng.random() < 0.7:
        keys = rng.sample(letters, pairs)
        if rng.random() < 0.3:
            keys.sort()
    else:
        keys = [letters[k // 26] + letters[k % 26] for k in rng.sample(range(676), pairs)]
    top = 10 if rng.random() < 0.95 else 100
    return {key: str(rng.randrange(top)) for key in keys}


def recall_turns(rng: random.Random, pairs: int, questions: int = 1) -> list[Turn]:
    """`a=3 b=7 ? b` -> `7`; each further question about the table is another turn: `? a` -> `3`."""
    table = recall_table(rng, pairs)
    keys = list(table)
    first = rng.choice(keys)
    listing = " ".join(f"{key}={value}" for key, value in table.items())
    mark = "? " if rng.random() < 0.9 else "?"
    turns = [(f"{listing} {mark}{first}", table[first])]
    for _ in range(questions - 1):
        key = rng.choice(keys)
        turns.append((f"{mark}{key}", table[key]))
    return turns


def recall(rng: random.Random, size: int = 0) -> Turn:
    """Return one recall question over `size` (or 2 to 10) pairs."""
    return recall_turns(rng, size or rng.randint(2, 10))[0]


def chat(rng: random.Random, size: int = 0) -> Turn:
    """A greeting, or any other message that is not a task, gets the fixed help sentence."""
    if rng.random() < 0.5:
        text = rng.choice(GREETINGS)
    else:
        text = " ".join(rng.choice(WORDS) for _ in range(size or rng.randint(1, 8)))
    if rng.random() < 0.4:
        text = text.capitalize()
    return text + rng.choice(("", "", "", "!", "?", ".")), HELP_REPLY


TASKS: dict[str, Callable[[random.Random, int], Turn]] = {
    "addition": addition, "spelled addition": spelled_addition, "reverse": reverse, "sort": sort, "copy": copy,
    "recall": recall, "chat": chat,
}  # fmt: skip
TASK_WEIGHTS = {
    "addition": 0.5, "spelled addition": 0.12, "reverse": 0.06, "sort": 0.05, "copy": 0.07, "recall": 0.17,
    "chat": 0.03,
}  # fmt: skip
# name -> (task, size, number of earlier turns); size 0 draws the usual sizes
EVALUATIONS: dict[str, tuple[str, int, int]] = {
    "addition": ("addition", 0, 0),
    "addition, 3 digits": ("addition", 3, 0),
    "addition, spellings": ("spelled addition", 0, 0),
    "reverse": ("reverse", 0, 0),
    "reverse, 10 items": ("reverse", 10, 0),
    "sort": ("sort", 0, 0),
    "sort, 10 items": ("sort", 10, 0),
    "copy": ("copy", 0, 0),
    "recall, 2-10 pairs": ("recall", 0, 0),
    "recall, 26 pairs": ("recall", 26, 0),
    "recall, 60 pairs": ("recall", 60, 0),
    "recall, 120 pairs": ("recall", 120, 0),
    "chat": ("chat", 0, 0),
    "addition, 4th turn": ("addition", 0, 3),
    "reverse, 4th turn": ("reverse", 0, 3),
    "sort, 4th turn": ("sort", 0, 3),
    "recall, 4th turn": ("recall", 0, 3),
}
QUICK = ("addition", "reverse", "sort", "copy", "recall, 2-10 pairs", "recall, 26 pairs", "recall, 60 pairs")


def held_out_turn(rng: random.Random, task: str, size: int = 0) -> Turn:
    """Draw a turn of `task` whose user message is reserved for evaluation."""
    while True:
        turn = TASKS[task](rng, size)
        if is_held_out(turn[0]):
            return turn


def held_out_dialogs(name: str, count: int) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Yield `count` held-out dialogs of one evaluation with the expected reply."""
    task, size, history = EVALUATIONS[name]
    rng = random.Random(f"evaluate/{name}")
    others = [other for other in TASK_WEIGHTS if other != "chat"]
    for _ in range(count):
        turns = [held_out_turn(rng, rng.choice(others)) for _ in range(history)]
        turns.append(held_out_turn(rng, task, size))
        messages = []
        for user, reply in turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        yield messages[:-1], turns[-1][1]


def _training_turns(rng: random.Random, budget: int, recall_share: float) -> list[Turn]:
    """Draw one task for training: one turn, or a table with several questions about it."""
    weights = TASK_WEIGHTS | {"recall": recall_share * (1.0 - TASK_WEIGHTS["recall"]) / (1.0 - recall_share)}
    task = rng.choices(list(weights), list(weights.values()))[0]
    if task != "recall":
        return [TASKS[task](rng, 0)]
    most = max(2, min(120, (budget - 20) // 6))
    pairs = max(2, min(most, round(2 * (most / 2) ** rng.random())))
    return recall_turns(rng, pairs, rng.randint(1, 3 + pairs // 6))


def turn_cost(turn: Turn) -> int:
    """Number of tokens a turn takes in the chat format (one token per byte and eight of markup)."""
    return len(turn[0].encode()) + len(turn[1].encode()) + 8


def conversation(
    rng: random.Random, length: int, recall_share: float = TASK_WEIGHTS["recall"]
) -> tuple[str | None, list[Turn]]:
    """Draw a system prompt (or None) and turns that together take at most `length` tokens."""
    system = rng.choice(SYSTEM_PROMPTS) if length > 64 and rng.random() < 0.2 else None
    budget = length - (len(system) + 4 if system else 0)
    turns: list[Turn] = []
    misses = 0
    while misses < 3 and budget > 16:
        for turn in _training_turns(rng, budget, recall_share):
            if turn_cost(turn) > budget or is_held_out(turn[0]):
                misses += 1
                break
            turns.append(turn)
            budget -= turn_cost(turn)
    return system, turns
