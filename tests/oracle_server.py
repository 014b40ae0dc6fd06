"""A small server with OpenAI's API on top of transformers, in the dialects of several engines, and with faults.

It answers what ``tp_engine.apps.check.url_check`` asks, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

DIALECTS = ("vllm", "llama.cpp", "openai")
_TOP = 4
_JSON = '{"city": "Oslo", "sunny": true}'


class OracleModel:
    """A checkpoint's model and tokenizer.  ``faults`` are the names that the methods look for."""

    def __init__(self, folder: Path, tokenizer: Any, *, dialect: str = "vllm", faults: frozenset[str] = frozenset(),
                 dtype: torch.dtype = torch.float32, **config: Any) -> None:  # fmt: skip
        from transformers import AutoConfig, AutoModelForCausalLM

        changed = AutoConfig.from_pretrained(folder)
        for name, value in config.items():
            setattr(changed, name, value)
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=changed, dtype=dtype).eval()
        self.tokenizer, self.dialect, self.faults = tokenizer, dialect, faults
        self._lock, self._running = threading.Lock(), 0
        self._counts = Counter[tuple[int, ...]]()

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return [0, *ids] if "adds BOS" in self.faults else ids

    def chat_text(self, messages: list[dict[str, Any]]) -> str:
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text.replace(": ", ":") if "template without a blank" in self.faults else text

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """(n, vocabulary), float32."""
        with self._lock:
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return found * 0.9 if "after temperature" in self.faults else found

    def generate(self, ids: list[int], body: dict[str, Any]) -> tuple[list[int], list[torch.Tensor], str]:
        """Tokens, the log-probabilities (vocabulary,) before each, and why they end."""
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
        for _ in range(body["max_tokens"]):
            row = self.logprobs(self._read(ids, tokens))[-1]
            pushed = row.clone()
            for token, value in bias.items():
                pushed[token] += value
            tokens.append(int(pushed.argmax()))
            rows.append(row)
            ends = tokens[-1] == 1 and not body.get("ignore_eos")
            if ends and "EOS missing" not in self.faults:
                return tokens, rows, "stop"
        return tokens, rows, "length"

    def _read(self, ids: list[int], tokens: list[int]) -> list[int]:
        """The sequence that the model reads, which a fault may change."""
        is_stale = "stale prefix" in self.faults and self._counts[tuple(ids)] > 2
        is_mixed = "rows mixed up" in self.faults and self._running > 1
        return [ids[0] ^ 7, *ids[1:], *tokens] if is_stale or is_mixed else [*ids, *tokens]

    @contextlib.contextmanager
    def running(self, ids: list[int]) -> Iterator[None]:
        """Count a request, among those that run now and among those of its prompt."""
        with self._lock:
            self._counts[tuple(ids)] += 1
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request; None for a path that the dialect does not have."""
        if path == "/tokenize" and self.dialect != "openai":
            return self._tokenize(body)
        if path == "/apply-template" and self.dialect == "llama.cpp":
            return {"prompt": self.chat_text(body["messages"])}
        if path == "/v1/completions":
            prompt = body["prompt"]
            return self._complete(self.ids_of(prompt) if isinstance(prompt, str) else prompt, body, is_chat=False)
        if path == "/v1/chat/completions":
            if "response_format" in body or "tools" in body:
                return self._shaped(body)
            text = self.chat_text(body["messages"])
            return self._complete(self.tokenizer(text, add_special_tokens=False)["input_ids"], body, is_chat=True)
        return None

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.dialect == "llama.cpp":
            return {"tokens": self.ids_of(body["content"]) if "content" in body else []}
        if "messages" in body:
            text = self.chat_text(body["messages"])
            return {"tokens": self.tokenizer(text, add_special_tokens=False)["input_ids"]}
        return {"tokens": self.ids_of(body["prompt"])}

    def _shaped(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "no" if "ignores schemas" in self.faults else _JSON}
        if "tools" in body:
            call = {"name": "get_weather", "arguments": '{"city": "Lima"}'}
            message = {"role": "assistant", "content": json.dumps(call)}
            if "calls as text" not in self.faults:
                message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    def _complete(self, ids: list[int], body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
        with self.running(ids):
            tokens, rows, reason = self.generate(ids, body)
        choice: dict[str, Any] = {"finish_reason": reason}
        if body.get("logprobs"):
            choice["logprobs"] = self._content(tokens, rows) if is_chat or self.dialect == "llama.cpp" else None
            choice["logprobs"] = choice["logprobs"] or self._columns(tokens, rows)
        if self.dialect == "vllm":
            choice["token_ids"] = tokens
            if "prompt_logprobs" in body:
                pairs = zip(self.logprobs(ids), ids[1:], strict=False)
                choice["prompt_logprobs"] = [None, *(self._of_prompt(row, token) for row, token in pairs)]
        elif self.dialect == "openai" and body.get("echo"):
            given = self.logprobs(ids)
            own = [float(given[at, ids[at + 1]]) for at in range(len(ids) - 1)]
            choice["logprobs"]["token_logprobs"] = [None, *own, *choice["logprobs"]["token_logprobs"]]
        if "hides a token" in self.faults and choice.get("logprobs") and len(ids) % 2:
            choice["logprobs"] = {name: column[:2] + column[3:] for name, column in choice["logprobs"].items()}
            choice.pop("token_ids", None)
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}}

    def _of_prompt(self, row: torch.Tensor, token: int) -> dict[str, dict[str, float]]:
        named = {*row.topk(_TOP).indices.tolist(), token}
        return {str(one): {"logprob": float(row[one])} for one in named}

    def _named(self, token: int) -> dict[str, Any]:
        if self.dialect == "vllm":
            return {"token": f"token_id:{token}"}
        text = {"token": self.tokenizer.decode([token])}
        return {**text, "id": token} if self.dialect == "llama.cpp" else text

    def _content(self, tokens: list[int], rows: list[torch.Tensor]) -> dict[str, Any]:
        def told(token: int, row: torch.Tensor) -> dict[str, Any]:
            return {**self._named(token), "logprob": float(row[token])}

        pairs = zip(tokens, rows, strict=True)
        tops = [[told(other, row) for other in row.topk(_TOP).indices.tolist()] for row in rows]
        return {"content": [{**told(*pair), "top_logprobs": top} for pair, top in zip(pairs, tops, strict=True)]}

    def _columns(self, tokens: list[int], rows: list[torch.Tensor]) -> dict[str, Any]:
        tops = [{self._named(one)["token"]: float(row[one]) for one in row.topk(_TOP).indices.tolist()} for row in rows]
        return {
            "tokens": [self._named(token)["token"] for token in tokens],
            "token_logprobs": [float(row[token]) for token, row in zip(tokens, rows, strict=True)],
            "top_logprobs": tops,
        }


@contextlib.contextmanager
def oracle_server(model: OracleModel) -> Iterator[str]:
    """Yield the address of a server in front of ``model``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = model.answer(self.path, body)
            self._send(answer or {"error": {"message": f"no {self.path}"}}, 200 if answer else 404)

        def _send(self, content: dict[str, Any], status: int = 200) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
