"""The demo model through HTTP on 2 ranks: answers are right, streamed or not."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.serving import Server, launch, serve, serving
from tests.ranks.warm_ranks import started_ranks
from tests.start_lines import check_start
from tests.tiers import fast_first, slow_but

QUESTIONS = {
    "12+34=": "46",
    "reverse: 3 1 4": "4 1 3",
    "sort: 3 1 4": "1 3 4",
    "copy: hello world": "hello world",
    "a=3 b=7 c=5 ? b": "7",
}


def recall_question(num_pairs: int, seed: int) -> tuple[str, str]:
    """A long list of keys and digits, and one key to recall: an error in any KV block makes the answer wrong."""
    rng = random.Random(seed)
    keys = rng.sample([a + b for a in "abcdefgh" for b in "abcdefgh"], num_pairs)
    values = [str(rng.randrange(10)) for _ in keys]
    asked = rng.randrange(num_pairs)
    pairs = " ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    return f"{pairs} ? {keys[asked]}", values[asked]


def own_text(server: Server) -> str:
    """The job's output up to torchrun's own report of the end, which has a traceback."""
    return server.text().partition("torch/distributed/")[0]


def ask(client: openai.OpenAI, question: str) -> str:
    answer = client.chat.completions.create(
        model="demo_model", messages=[{"role": "user", "content": question}], temperature=0
    )
    return answer.choices[0].message.content or ""


def ask_streamed(client: openai.OpenAI, question: str) -> str:
    chunks = client.chat.completions.create(
        model="demo_model", messages=[{"role": "user", "content": question}], temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("num_ranks", slow_but([2], [0, 2]))
def test_the_demo_model_answers_through_http(num_ranks: int) -> None:
    """Oracle: arithmetic; a start of a screen.  Without torchrun (0), rank 0 starts one other rank; with torchrun: 2
    ranks."""
    small = ["--device", "cpu", "--num-gpu-blocks-override", "512", "--block-size", "16"]
    small += [] if num_ranks else ["-tp", "2"]
    with serving(num_ranks, *small, timeout_s=300) as server:
        check_start(server.text())
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)
        for question, expected in QUESTIONS.items():
            assert expected in ask(client, question), question
            assert expected in ask_streamed(client, question), question
        assert "46" in client.responses.create(model="demo_model", input="12+34=", temperature=0).output_text
        right = [answer in ask(client, question) for question, answer in (recall_question(40, s) for s in range(5))]
        assert sum(right) >= 4
        beams = client.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": "12+34="}], n=3, max_tokens=8,
            extra_body={"use_beam_search": True},
        )  # fmt: skip
        assert "46" in (beams.choices[0].message.content or "") and len(beams.choices) == 3
        assert client.models.list().data[0].id == "demo_model"
        metrics = httpx.get(server.url + "/metrics", timeout=100).text
        assert "tp_engine" in metrics
        for word in ("Available KV cache memory:", "GPU KV cache size: 8,192 tokens", "Maximum concurrency for 1,024"):
            assert word in server.text()
    assert "Traceback" not in own_text(server)


@pytest.mark.parametrize(
    ("arguments", "words"),
    fast_first(
        2,
        [
            (("--model", "/no/such/model"), ("/no/such/model",)),
            (("--no-such-flag", "1"), ("--no-such-flag",)),
            (("--tensor-parallel-size", "3"), ("3", "1, 2, 4, 8")),
        ],
    ),
)
def test_what_can_not_work_ends_in_one_clear_message(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Oracle: one message without a traceback, and a non-zero exit code: world size, model, flags."""
    server = launch(0, ["--port", "0", "--device", "cpu", *arguments])
    code = server.process.wait(340)
    server.stop()
    assert code in (1, 2), server.text()
    check_message(server.text(), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "arguments", "words"),
    [(3, (), ("3", "1, 2, 4, 8")), (1, ("--kv-cache-memory-bytes", "100000"), ("max_model_len",))],
)
def test_launched_ranks_tell_once_what_can_not_work(
    num_ranks: int, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Oracle: as above, of the ranks of a launcher: world size, cache."""
    with started_ranks(num_ranks, serve, ("--port", "0", "--device", "cpu", *arguments)) as (ranks, log):
        for rank in ranks:
            rank.join(120)
        assert all(rank.exitcode in (1, 2) for rank in ranks), log.read_text()
        check_message(log.read_text(), words)


def check_message(text: str, words: tuple[str, ...]) -> None:
    assert text.count("error:") == 1 and "Traceback" not in text, text[-3000:]
    for word in words:
        assert word in text, text[-3000:]


def test_a_taken_port_is_refused_at_once(tmp_path: Path) -> None:
    """Oracle: exit code 1 and the port in the message, before the model is loaded."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = launch(0, ["--device", "cpu", "--port", str(port)])
        assert server.process.wait(340) == 1
        assert str(port) in server.text() and "loading weights" not in server.text()
