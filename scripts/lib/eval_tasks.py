"""Writes the tasks that ``tp-engine eval`` ships: word problems, sums, and facts to choose from.

    scripts/generate

Every text is this project's own.  A seed makes them, so that a change of a sentence changes no number, and a test
compares the files with what this writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "tp_engine" / "apps" / "eval" / "tasks"
NUM_PER_FORM = 10

NAMES = (
    "Amara", "Bo", "Chidi", "Dana", "Emre", "Freya", "Goran", "Hana", "Ines", "Jonas", "Keiko", "Luca", "Mina", "Noor",
    "Oskar", "Priya", "Quentin", "Rosa", "Sami", "Tove", "Umar", "Vera", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip
THINGS = ("apples", "stamps", "marbles", "postcards", "buttons", "shells", "pencils", "stickers", "walnuts", "tickets")

Draw = Callable[[int, int], int]
Problem = tuple[str, str, int]
"""A question, its solution with every step as an equation, and the answer."""


def gift(d: Draw, who: str, other: str, things: str) -> Problem:
    had, bought, given = d(12, 60), d(5, 40), d(3, 11)
    return (
        f"{who} has {had} {things} and buys {bought} more. Then {who} gives {given} of them to {other}. How many "
        f"{things} does {who} have now?",
        f"With the new ones {who} has {had} + {bought} = {had + bought} {things}. After the gift "
        f"{had + bought} - {given} = {had + bought - given} are left.",
        had + bought - given,
    )


def boxes(d: Draw, who: str, other: str, things: str) -> Problem:
    num, each, loose = d(3, 9), d(6, 24), d(2, 15)
    return (
        f"{who} packs {num} boxes with {each} {things} each, and {loose} {things} do not fit. How many {things} were "
        "there before packing?",
        f"The boxes hold {num} * {each} = {num * each} {things}. With the others that is {num * each} + {loose} = "
        f"{num * each + loose}.",
        num * each + loose,
    )


def shopping(d: Draw, who: str, other: str, things: str) -> Problem:
    bread, cheese, loaves = d(2, 5), d(4, 9), d(2, 6)
    total = bread * loaves + cheese
    paid = total + d(1, 30)
    return (
        f"A loaf of bread costs {bread} euros and a piece of cheese {cheese} euros. {who} buys {loaves} loaves and one "
        f"piece of cheese, and pays with {paid} euros. How many euros of change does {who} get?",
        f"The bread costs {loaves} * {bread} = {loaves * bread} euros. With the cheese that is {loaves * bread} + "
        f"{cheese} = {total}. The change is {paid} - {total} = {paid - total} euros.",
        paid - total,
    )


def reading(d: Draw, who: str, other: str, things: str) -> Problem:
    pace, days, rest = d(8, 30), d(3, 9), d(10, 90)
    return (
        f"{who} reads {pace} pages of a book every day. After {days} days {rest} pages are left. How many pages does "
        "the book have?",
        f"{who} has read {days} * {pace} = {days * pace} pages. The book has {days * pace} + {rest} = "
        f"{days * pace + rest} pages.",
        days * pace + rest,
    )


def train(d: Draw, who: str, other: str, things: str) -> Problem:
    start, left, joined, later = d(60, 180), d(10, 50), d(5, 60), d(3, 20)
    first = start - left + joined
    return (
        f"A train leaves with {start} passengers. At the first stop {left} get off and {joined} get on. At the second "
        f"stop {later} get off and twice as many get on. How many passengers are in the train then?",
        f"After the first stop there are {start} - {left} = {start - left} and then {start - left} + {joined} = "
        f"{first} passengers. At the second stop 2 * {later} = {2 * later} get on, so there are {first} - {later} + "
        f"{2 * later} = {first + later}.",
        first + later,
    )


def rows_of_trees(d: Draw, who: str, other: str, things: str) -> Problem:
    rows, each, felled = d(6, 15), d(8, 20), d(3, 30)
    return (
        f"An orchard has {rows} rows of {each} trees. A storm fells {felled} trees, and {who} plants two new trees for "
        "each of these. How many trees does the orchard have then?",
        f"There were {rows} * {each} = {rows * each} trees. The storm leaves {rows * each} - {felled} = "
        f"{rows * each - felled}. {who} plants 2 * {felled} = {2 * felled}, so there are {rows * each - felled} + "
        f"{2 * felled} = {rows * each + felled}.",
        rows * each + felled,
    )


def share(d: Draw, who: str, other: str, things: str) -> Problem:
    friends, each, kept = d(3, 8), d(4, 15), d(2, 9)
    total = friends * each + kept
    return (
        f"{who} has {total} {things}, keeps {kept} of them, and shares the others equally among {friends} friends. How "
        f"many {things} does each friend get?",
        f"There are {total} - {kept} = {total - kept} {things} to share. Each friend gets {total - kept} / {friends} = "
        f"{each}.",
        each,
    )


def wages(d: Draw, who: str, other: str, things: str) -> Problem:
    hourly, hours, days, rent = d(11, 25), d(3, 8), d(3, 6), d(20, 60)
    earned = hourly * hours * days
    return (
        f"{who} earns {hourly} euros an hour and works {hours} hours a day on {days} days of a week. {rent} euros of "
        f"the week's wage go into savings. How many euros are left?",
        f"A day brings {hourly} * {hours} = {hourly * hours} euros, and the week {hourly * hours} * {days} = {earned}. "
        f"Of that {earned} - {rent} = {earned - rent} euros are left.",
        earned - rent,
    )


def ages(d: Draw, who: str, other: str, things: str) -> Problem:
    young, times, years = d(4, 12), d(2, 5), d(3, 12)
    return (
        f"{who} is {young} years old, and {other} is {times} times as old. How old will {other} be in {years} years?",
        f"{other} is {times} * {young} = {times * young} now, and {times * young} + {years} = {times * young + years} "
        f"in {years} years.",
        times * young + years,
    )


def tank(d: Draw, who: str, other: str, things: str) -> Problem:
    inflow, drain, minutes, before = d(12, 30), d(2, 9), d(4, 15), d(10, 80)
    gained = (inflow - drain) * minutes
    return (
        f"A tank holds {before} litres. Every minute {inflow} litres flow in and {drain} litres flow out. How many "
        f"litres does it hold after {minutes} minutes?",
        f"Every minute it gains {inflow} - {drain} = {inflow - drain} litres, in {minutes} minutes {inflow - drain} * "
        f"{minutes} = {gained}. It holds {before} + {gained} = {before + gained} litres.",
        before + gained,
    )


def classes(d: Draw, who: str, other: str, things: str) -> Problem:
    teams, size, ill = d(4, 9), d(5, 12), d(2, 9)
    present = teams * size - ill
    return (
        f"A school forms {teams} teams of {size} children. On the day of the match {ill} children are ill. Every child "
        "who comes gets 2 bottles of water. How many bottles are needed?",
        f"There are {teams} * {size} = {teams * size} children, of whom {teams * size} - {ill} = {present} come. They "
        f"need 2 * {present} = {2 * present} bottles.",
        2 * present,
    )


def discount(d: Draw, who: str, other: str, things: str) -> Problem:
    price, percent, num = 20 * d(2, 10), 5 * d(1, 8), d(2, 4)
    off = price * percent // 100
    return (
        f"A coat costs {price} euros. In a sale it is {percent} percent cheaper. {who} buys {num} of these coats in "
        "the sale. How many euros does that cost?",
        f"The discount is {price} * {percent} / 100 = {off} euros, so a coat costs {price} - {off} = {price - off}. "
        f"Together they cost {num} * {price - off} = {num * (price - off)} euros.",
        num * (price - off),
    )


def bakery(d: Draw, who: str, other: str, things: str) -> Problem:
    trays, rolls, sold, price = d(4, 12), d(12, 24), d(20, 45), d(2, 4)
    left = trays * rolls - sold
    return (
        f"A bakery bakes {trays} trays of {rolls} rolls and sells {sold} rolls in the morning. In the afternoon it "
        f"sells all the others for {price} euros each. How many euros does it take in the afternoon?",
        f"There are {trays} * {rolls} = {trays * rolls} rolls, and {trays * rolls} - {sold} = {left} are left at noon. "
        f"They bring {left} * {price} = {left * price} euros.",
        left * price,
    )


def cycling(d: Draw, who: str, other: str, things: str) -> Problem:
    fast, slow, hours = d(16, 28), d(8, 15), d(2, 6)
    return (
        f"{who} cycles {fast} kilometres an hour and {other} {slow} kilometres an hour. Both start at the same place "
        f"and ride in the same direction for {hours} hours. How many kilometres is {who} ahead then?",
        f"Every hour {who} gains {fast} - {slow} = {fast - slow} kilometres, so after {hours} hours the distance is "
        f"{fast - slow} * {hours} = {(fast - slow) * hours}.",
        (fast - slow) * hours,
    )


def garden(d: Draw, who: str, other: str, things: str) -> Problem:
    length, width, gate = d(8, 30), d(5, 20), d(1, 4)
    around = 2 * (length + width)
    return (
        f"A rectangular garden is {length} metres long and {width} metres wide. {who} builds a fence around it, with a "
        f"gap of {gate} metres for a gate. How many metres of fence are needed?",
        f"Two sides are {length} + {width} = {length + width} metres, and all four 2 * {length + width} = {around}. "
        f"Without the gap that is {around} - {gate} = {around - gate} metres.",
        around - gate,
    )


def eggs(d: Draw, who: str, other: str, things: str) -> Problem:
    hens, days, eaten = d(4, 12), d(5, 10), d(4, 16)
    left = hens * days - eaten
    packs, over = divmod(left, 6)
    return (
        f"{who} keeps {hens} hens, and each lays one egg a day. In {days} days the family eats {eaten} of the eggs. "
        "The others are put into boxes of 6. How many boxes become full?",
        f"The hens lay {hens} * {days} = {hens * days} eggs, and {hens * days} - {eaten} = {left} are left. They fill "
        f"({left} - {over}) / 6 = {packs} boxes.",
        packs,
    )


FORMS = (gift, boxes, shopping, reading, train, rows_of_trees, share, wages, ages, tank, classes, discount, bakery,
         cycling, garden, eggs)  # fmt: skip


def word_problems() -> Iterator[dict[str, Any]]:
    """Yield 160 problems of two to four steps, as easy as those of primary schools."""
    yield {
        "scoring": "number",
        "max_tokens": 400,
        "as_chat": "{prompt}\n\nSolve this step by step. End with one line: The answer is, and the number.",
        "as_completion": "Question: {prompt}\nAnswer:",
        "stop": ["\n\n", "Question:"],
    }
    rng = random.Random(64)
    for number in range(NUM_PER_FORM):
        for form in FORMS:
            who, other = rng.sample(NAMES, 2)
            question, solution, answer = form(rng.randint, who, other, rng.choice(THINGS))
            yield {
                "id": f"{form.__name__}-{number}",
                "prompt": question,
                "answer": answer,
                "solution": f"{solution} The answer is {answer}.",
            }


def sums() -> Iterator[dict[str, Any]]:
    """Yield 200 additions of one to three digits, as the demo model knows them."""
    yield {"scoring": "exact", "max_tokens": 8, "stop": ["\n"]}
    rng = random.Random(46)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < 200:
        pairs[tuple(rng.randint(0, 10 ** rng.randint(1, 3) - 1) for _ in range(2))] = None  # type: ignore[index]
    for one, other in pairs:
        yield {"id": f"{one}+{other}", "prompt": f"{one}+{other}=", "answer": str(one + other)}


OPPOSITES = (
    "hot cold", "big small", "early late", "empty full", "dry wet", "old young", "open closed", "loud quiet",
    "heavy light", "left right", "north south", "east west", "first last", "rich poor", "soft hard", "deep shallow",
    "wide narrow", "sharp blunt", "strong weak", "thick thin", "true false", "up down", "day night", "summer winter",
    "begin end", "buy sell", "push pull", "love hate", "win lose", "remember forget",
)  # fmt: skip
CAPITALS = (
    "France:Paris", "Italy:Rome", "Spain:Madrid", "Japan:Tokyo", "Egypt:Cairo", "Norway:Oslo", "Peru:Lima",
    "Kenya:Nairobi", "Cuba:Havana", "Austria:Vienna", "Greece:Athens", "Poland:Warsaw", "Portugal:Lisbon",
    "Ireland:Dublin", "Sweden:Stockholm", "Finland:Helsinki", "Hungary:Budapest", "Germany:Berlin", "Canada:Ottawa",
    "Chile:Santiago", "Thailand:Bangkok", "India:New Delhi", "Iran:Tehran", "Denmark:Copenhagen", "Belgium:Brussels",
)  # fmt: skip
YOUNG = ("dog:puppy", "cat:kitten", "cow:calf", "sheep:lamb", "horse:foal", "hen:chick", "duck:duckling", "goat:kid",
         "lion:cub", "frog:tadpole", "deer:fawn", "goose:gosling")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip


def facts() -> Iterator[dict[str, Any]]:
    """Yield sentences with four ends each, of which the right one must be the likeliest."""
    yield {"scoring": "choice"}
    rng = random.Random(4)
    opposites = [pair.split() for pair in OPPOSITES]
    tables: list[tuple[str, Sequence[Sequence[str]]]] = [
        ("The opposite of {} is", opposites),
        ("The capital of {} is", [pair.split(":") for pair in CAPITALS]),
        ("A young {} is called a", [pair.split(":") for pair in YOUNG]),
        ("The day after {} is", list(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True))),
        ("The month after {} is", list(zip(MONTHS, MONTHS[1:] + MONTHS[:1], strict=True))),
    ]
    for sentence, pairs in tables:
        for asked, right in pairs:
            others = [other for _, other in pairs if other not in (right, asked)]
            choices = [right, *rng.sample(others, 3)]
            rng.shuffle(choices)
            prompt = sentence.format(asked)
            yield {"id": prompt, "prompt": prompt, "choices": [f" {one}" for one in choices], "answer": f" {right}"}


TASKS = {"word_problems": word_problems, "sums": sums, "facts": facts}


def text_of(name: str) -> str:
    """Return the file of a task, a JSON object a line."""
    return "".join(json.dumps(line) + "\n" for line in TASKS[name]())


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in TASKS:
        (FOLDER / f"{name}.jsonl").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
