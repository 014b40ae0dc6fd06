"""Files and batches: OpenAI's client against a running server, whose end and restart loses nothing."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from openai.types import Batch as BatchType
from openai.types import FileObject

from tests.e2e.frontend import DEADLINE_S, INFO, RunningServer, running_server, wait_until
from tests.e2e.scripted import say, scripted_engine
from tests.fake_engine import FakeEngine
from tests.panicking import PANIC_TEXT, panicking_model
from tp_engine.api.batches.lines import count_results
from tp_engine.api.batches.objects import Batch, new_id
from tp_engine.api.batches.store import BatchStore, page
from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import ConfigError
from tp_engine.server.access import Caller
from tp_engine.server.config import ServerConfig
from tp_engine.server.frontend_process import end_frontend
from tp_engine.server.main import open_store

CHAT: Any = "/v1/chat/completions"


def config(folder: Path, **options: Any) -> ServerConfig:
    return ServerConfig(port=0, generation_config="vllm", batch_storage_dir=str(folder), **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("batches")
    keys = {"api_key": ("sesame", "other"), "admin_api_key": ("operator",)}
    info = msgspec.structs.replace(INFO, tokenizer=str(panicking_model(tmp_path_factory.mktemp("model"))))
    with running_server(
        FakeEngine(say, model_info=info), config(folder, **keys, batch_max_file_bytes=100_000)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def openai_client(server: RunningServer, key: str = "sesame") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, timeout=DEADLINE_S, max_retries=0)


def line(custom_id: str, text: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"SAY:{text}"}], "max_tokens": 50} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def text_of(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def sent(client: openai.OpenAI, lines: list[Any], **options: Any) -> BatchType:
    file = client.files.create(file=("in.jsonl", text_of(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: BatchType) -> BatchType:
    """The batch when it has ended, checked against the client's own types."""
    states = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in states, "the batch to end")
    found = client.batches.retrieve(batch.id)
    return BatchType.model_validate(found.model_dump(mode="json"))


def metrics(server: RunningServer) -> dict[str, float]:
    """What /metrics says of batches: by state, lines by result, and lines that wait."""
    text = server.client.get("/metrics").text
    rows = re.findall(r"^tp_engine:(batch\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    label = re.compile(r'(?:status|result)="(\w+)"')
    return {" ".join([name, *label.findall(labels)]): float(value) for name, labels, value in rows}


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "a line has two results"
    return {one["custom_id"]: one for one in found}


def test_a_batch_from_its_file_to_its_results(server: RunningServer, client: openai.OpenAI) -> None:
    """Oracle: the scripted answers; a line that cannot be served, also one over which the tokenizer's library panics,
    is an error of its own; the metrics count both."""
    before = metrics(server)
    lines = [line(f"c{number}", f"text {number}") for number in range(20)]
    lines.append(line("wrong", max_tokens=-1))
    lines.append(line("panic", PANIC_TEXT))
    batch = sent(client, lines, metadata={"k": "v"})
    assert (batch.status, batch.metadata) == ("validating", {"k": "v"})
    done = ended(client, batch)
    assert (done.status, done.errors, done.model) == ("completed", None, "demo")
    counts = done.request_counts
    assert counts is not None and (counts.total, counts.completed, counts.failed) == (22, 20, 2)
    after = metrics(server)
    changes = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changes == {"batches completed": 1, "batch_lines_total completed": 20, "batch_lines_total failed": 2}
    assert after["batch_lines_waiting"] == 0
    answers = results(client, done.output_file_id)
    for number in range(20):
        response = answers[f"c{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["message"]["content"] == f"text {number}"
    errors = results(client, done.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in errors.items()} == {"wrong": 400, "panic": 400}
    usage = [one["response"]["body"]["usage"] for one in answers.values()]
    assert done.usage is not None
    assert done.usage.output_tokens == sum(one["completion_tokens"] for one in usage)
    assert len({one[name] for one in answers.values() for name in ("id", "custom_id")}) == 40
    assert done.completed_at is not None and done.in_progress_at is not None
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.batches.cancel(batch.id)


def test_files_and_batches_belong_to_their_key(server: RunningServer, client: openai.OpenAI) -> None:
    """Oracle: for another key they are as unknown ones, word for word, on every route; an operator's sees all."""
    done = ended(client, sent(client, [line("a")]))
    assert done.output_file_id is not None
    with openai_client(server, "other") as stranger, openai_client(server, "operator") as operator:
        own = stranger.files.create(file=("own.jsonl", text_of([line("b")])), purpose="batch")
        assert [one.id for one in stranger.files.list()] == [own.id] and not [*stranger.batches.list()]
        for file_id in (done.input_file_id, done.output_file_id):
            for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
                with pytest.raises(openai.NotFoundError, match=f"there is no file '{file_id}'"):
                    call(file_id)
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            stranger.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h")
        for change in (stranger.batches.retrieve, stranger.batches.cancel):
            with pytest.raises(openai.NotFoundError, match=f"there is no batch '{done.id}'"):
                change(done.id)
        for page_of in (stranger.files.list, stranger.batches.list):
            with pytest.raises(openai.BadRequestError, match="is no id of this list"):
                page_of(after=done.id)
        assert operator.batches.retrieve(done.id).id == done.id
        assert operator.files.content(done.output_file_id).read() == client.files.content(done.output_file_id).read()
        assert {own.id, done.input_file_id} <= {one.id for one in operator.files.list()}
        assert "owner" not in operator.files.with_raw_response.retrieve(own.id).text
        assert operator.files.delete(own.id).deleted


def test_the_order_of_lists(tmp_path: Path) -> None:
    """Oracle: the order in which files were made, within one second and after a restart; the newest comes first."""
    made: list[str] = []
    for _ in range(2):
        with BatchStore(tmp_path, retention_s=9, max_bytes=9) as store:
            for _ in range(8):
                with store.incoming() as copy:
                    made.append(store.add_file(copy, "f", "batch", None).id)
            found = page(store.files.values(), after=None, limit=100)
            assert [one["id"] for one in found["data"]] == made[::-1]  # type: ignore[attr-defined]
            found = page(store.files.values(), after=made[2], limit=2, newest_first=False)
            assert [one["id"] for one in found["data"]] == made[3:5]  # type: ignore[attr-defined]


def test_an_owner_survives_a_restart(tmp_path: Path) -> None:
    """Oracle: what was given, in the store and among the results of a batch; the key itself is in no file."""
    caller = Caller(owner=hashlib.sha256(b"a secret key").digest())
    with BatchStore(tmp_path, retention_s=9, max_bytes=9) as store, store.incoming() as copy:
        file = store.add_file(copy, "f", "batch", None, caller.stored_owner)
        times: Any = {"created_at": 1, "expires_at": 2, "retention_s": 9}
        batch = Batch(
            id=new_id("batch_"), endpoint=CHAT, input_file_id=file.id, completion_window="1h",
            owner=caller.stored_owner, **times,
        )  # fmt: skip
        store.add_batch(batch, file)
        (store.batch_folder(batch) / "output").write_text("{}")
    with BatchStore(tmp_path, retention_s=9, max_bytes=9) as store:
        again = store.batch(batch.id, caller.may_see)
        store.keep_results(again)
        assert store.file(file.id, caller.may_see) and store.file(again.output_file_id or "", caller.may_see)
        for stranger in (Caller(), Caller(owner=b"x" * 32)):
            for name in (file.id, again.output_file_id or ""):
                with pytest.raises(HttpError, match="there is no file"):
                    store.file(name, stranger.may_see)
    texts = [one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()]
    assert not any(b"a secret key" in text for text in texts)


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (
            {
                "prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            (5, 2, 7, 3),
        ),
        (
            {
                "input_tokens": 5, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 3},
            },
            (5, 2, 7, 3),
        ),
        ({"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 7}, (5, 2, 7, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, (5, 0, 0, 0)),
        (None, (0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_usage_of_a_batch(tmp_path: Path, usage: Any, counted: tuple[int, ...]) -> None:
    """Oracle: twice what one answer of a chat, a response, a message or an embedding says."""
    output, errors = tmp_path / "output", tmp_path / "errors"
    errors.touch()
    output.write_bytes(text_of([{"response": {"body": {"model": "m", "usage": usage}}}] * 2))
    _, _, _, found = count_results(output, errors)
    num_in, num_cached, num_out, num_reasoning = (2 * one for one in counted)
    assert found == {
        "input_tokens": num_in, "input_tokens_details": {"cached_tokens": num_cached}, "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": num_reasoning}, "total_tokens": num_in + num_out,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), line("b", url="/v1/embeddings")], "invalid_url", 2),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([[1, 2]], "invalid_type", 1),
        ([], "empty_file", None),
    ],
)
def test_a_file_with_a_faulty_line_runs_nothing(
    client: openai.OpenAI, lines: list[Any], code: str, number: Any
) -> None:
    """Oracle: OpenAI's codes, and the number of the line."""
    done = ended(client, sent(client, lines))
    assert done.status == "failed" and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    assert [(one.code, one.line) for one in done.errors.data] == [(code, number)]


def test_files(server: RunningServer, client: openai.OpenAI) -> None:
    """Oracle: the bytes that were sent; pages of a list add up; a deleted file is 404."""
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    made = [
        client.files.create(file=(f"f{number}", b"x" * number), purpose="batch", expires_after=expires)
        for number in range(3)
    ]
    FileObject.model_validate(made[0].model_dump(mode="json"))
    assert made[2].expires_at == made[2].created_at + 3600
    assert client.files.content(made[2].id).content == b"xx"
    listed = [one.id for one in client.files.list(limit=1, purpose="batch")]
    assert {one.id for one in made} <= set(listed) and len(set(listed)) == len(listed)
    assert client.files.delete(made[0].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made[0].id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("../../lock")
    for purpose, content, words in (("other", b"x", "purpose"), ("batch", b"x" * 100_001, "larger than")):
        with pytest.raises(openai.APIStatusError, match=words):
            client.files.create(file=("f", content), purpose=purpose)  # type: ignore[arg-type]
    key = {"Authorization": "Bearer sesame"}
    for files, words in (({"other": ("f", b"x")}, "the form has no file"), (None, "of type")):
        reply = httpx.post(
            server.url + "/v1/files", headers=key, data={"purpose": "batch"}, files=files, timeout=DEADLINE_S
        )
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoint": "/v1/none"}, "endpoint"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"input_file_id": "file-none"}, "file-none"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
def test_what_a_batch_may_not_ask_for(client: openai.OpenAI, fields: Any, words: str) -> None:
    """Oracle: an error of the client's that names the field or the file."""
    file = client.files.create(file=("f", b"x"), purpose="batch")
    asked: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    with pytest.raises(openai.APIStatusError, match=words):
        client.batches.create(**asked)


def test_a_batch_that_is_cancelled_while_its_lines_are_checked(client: openai.OpenAI) -> None:
    """Oracle: it ends as cancelled; before the mend it stayed in the state cancelling for ever."""
    batch = sent(client, [line(f"c{number}") | {"body": {}} for number in range(1000)])
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"


def test_a_line_of_too_many_prompts_is_an_error(client: openai.OpenAI) -> None:
    """Oracle: the server's own limit for a body; the other line is answered."""
    url: Any = "/v1/completions"
    many, one = (
        {"custom_id": name, "method": "POST", "url": url, "body": {"prompt": prompt, "max_tokens": 1}}
        for name, prompt in (("many", ["x"] * 5000), ("one", "x"))
    )
    file = client.files.create(file=("in.jsonl", text_of([many, one])), purpose="batch")
    done = ended(client, client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h"))
    (error,) = results(client, done.error_file_id).values()
    assert "5000 prompts" in error["error"]["message"] and list(results(client, done.output_file_id)) == ["one"]


def test_a_compressed_file_is_refused(client: openai.OpenAI) -> None:
    """Oracle: a state and a reason; a few bytes could hold lines for hours."""
    file = client.files.create(file=("in.jsonl.gz", gzip.compress(text_of([line("a")]))), purpose="batch")
    done = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert done.errors.data[0].code == "invalid_file"


def test_the_store_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: 429 for one more than fits."""
    monkeypatch.setattr("tp_engine.api.batches.store.MAX_ENTRIES", 1)
    with BatchStore(tmp_path, retention_s=9, max_bytes=9) as store:
        store.check_room()
        with store.incoming() as copy:
            store.add_file(copy, "f", "batch", None)
        with pytest.raises(HttpError, match="1 files are stored"):
            store.check_room()


def test_a_form_of_another_site_is_refused(server: RunningServer) -> None:
    """Oracle: 403, as for bodies of JSON; a form is taken at this path alone."""
    headers = {"Authorization": "Bearer sesame"}
    files, fields = {"file": ("f", b"x")}, {"purpose": "batch"}
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        post = partial(client.post, files=files, data=fields)
        foreign = post("/v1/files", headers={**headers, "Origin": "http://evil.example"})
        elsewhere = post("/v1/completions", headers=headers)
        assert (foreign.status_code, elsewhere.status_code) == (403, 400)
        assert post("/v1/files", headers=headers).status_code == 200
        assert post("/v1/files").status_code == 401


@pytest.mark.slow
def test_a_cancelled_batch_keeps_what_is_finished(tmp_path: Path) -> None:
    """Oracle: the state, and each line at most once; interactive requests go first: the long lines have not ended."""
    engine = scripted_engine(step_delay_s=0.02)
    with running_server(engine, config(tmp_path)) as server, openai_client(server) as client:
        batch = sent(client, one_short_line(400))
        wait_until(partial(has_done, client, batch, 1), "a line to end")
        found = metrics(server)
        assert found["batches in_progress"] == 1
        assert found["batch_lines_waiting"] + found["batch_lines_total completed"] == 400
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "SAY:now"}])
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None and counts.completed < 64
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = ended(client, batch)
        assert done.status == "cancelled" and done.request_counts is not None
        assert 0 < len(results(client, done.output_file_id)) == done.request_counts.completed < 400
        server.wait_idle()


@pytest.mark.slow
def test_a_batch_whose_time_is_over(tmp_path: Path) -> None:
    """Oracle: finished lines are kept, all others are errors with the code batch_expired."""
    with (
        running_server(scripted_engine(step_delay_s=0.02), config(tmp_path)) as server,
        openai_client(server) as client,
    ):
        batch = sent(client, one_short_line(300))
        wait_until(partial(has_done, client, batch, 1), "a line to end")
        end_frontend(server.process)
    place = tmp_path / "batches" / batch.id / "batch.json"
    stored = json.loads(place.read_text())
    place.write_text(json.dumps(stored | {"expires_at": int(time.time()) - 1}))
    with running_server(scripted_engine(), config(tmp_path)) as server, openai_client(server) as client:
        done = ended(client, batch)
        answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
        found = metrics(server)
    assert (found["batches expired"], found["batch_lines_total failed"]) == (1, len(errors))
    assert done.status == "expired" and len(answers) + len(errors) == 300 and not answers.keys() & errors.keys()
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}


@pytest.mark.slow  # four servers
def test_a_killed_server_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Oracle: every line has its own answer once, after the server was killed at three moments."""
    texts = {f"c{number}": f"{number:0{5 + number % 40}}" for number in range(600)}
    batch = None
    for moment in (1, 200, 400):
        engine = scripted_engine(step_delay_s=0.02)
        with running_server(engine, config(tmp_path)) as server, openai_client(server) as client:
            batch = batch or sent(client, [line(custom_id, text) for custom_id, text in texts.items()])
            wait_until(partial(has_done, client, batch, moment), "some lines to end")
            process = psutil.Process(server.process.pid)
            process.kill()
            process.wait(DEADLINE_S)
    assert batch is not None
    with running_server(scripted_engine(), config(tmp_path)) as server, openai_client(server) as client:
        done = ended(client, batch)
        answers = results(client, done.output_file_id)
    assert done.status == "completed"
    said = {name: one["response"]["body"]["choices"][0]["message"]["content"] for name, one in answers.items()}
    assert said == texts


def one_short_line(count: int) -> list[dict[str, Any]]:
    """Lines of which one ends soon, and each of the others takes 400 steps; 64 run at a time."""
    return [line("c0", "x"), *(line(f"c{number}", "x" * 400, max_tokens=400) for number in range(1, count))]


def has_done(client: openai.OpenAI, batch: BatchType, least: int) -> bool:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts is not None and counts.completed >= least


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    """Oracle: the second server says whose folder it is, and ends."""
    with BatchStore(tmp_path, retention_s=1, max_bytes=1), pytest.raises(ConfigError, match="another server uses"):
        BatchStore(tmp_path, retention_s=1, max_bytes=1)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """Oracle: the files are there after the refusal, also where they are named as this store's folders are."""
    for name in ("files/photos/one", "incoming/two", "batches/three/four"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        BatchStore(tmp_path, retention_s=1, max_bytes=1)
    assert sorted(one.read_text() for one in tmp_path.rglob("*") if one.is_file()) == ["mine"] * 3


def test_a_file_beyond_the_storage_is_refused(tmp_path: Path) -> None:
    """Oracle: 413, and nothing is kept, whatever was free when the file began to come."""
    with BatchStore(tmp_path, retention_s=9, max_bytes=3) as store, store.incoming() as copy:
        copy.write(b"four")
        with pytest.raises(HttpError, match="3 bytes are free"):
            store.add_file(copy, "f", "batch", None)
        assert not store.files and not [*(tmp_path / "files").iterdir()]


def test_without_a_folder_the_server_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a private folder of temporary files, made for the first file and gone with the server; the one of a
    killed server goes too, and one in use stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, in_use = tmp_path / "tp_engine-batches-killed", tmp_path / "tp_engine-batches-used"
    BatchStore(killed, retention_s=9, max_bytes=9).close()
    with BatchStore(in_use, retention_s=9, max_bytes=9):
        store = open_store(ServerConfig())
        assert store is not None and 0 < store.free_bytes <= 1 << 30 and {*tmp_path.iterdir()} == {killed, in_use}
        with store.incoming() as copy:
            assert store.add_file(copy, "f", "batch", None).id in store.files
        (own,) = {*tmp_path.iterdir()} - {in_use}
        assert own.name.startswith("tp_engine-batches-") and own != killed and own.stat().st_mode & 0o777 == 0o700
        store.close()
        assert [*tmp_path.iterdir()] == [in_use]
        unused = open_store(ServerConfig())
        assert unused is not None
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
        with pytest.raises(HttpError, match="--batch-storage-dir"):
            unused.incoming()
        unused.close()


def test_a_server_without_files() -> None:
    """Oracle: 404, by which LiteLLM knows that it has to run the lines itself."""
    with running_server(scripted_engine(), ServerConfig(port=0, batch_storage_dir="none")) as server:
        for path in ("/v1/files", "/v1/batches"):
            reply = server.client.get(path)
            assert reply.status_code == 404 and "--batch-storage-dir" in reply.json()["error"]["message"]
