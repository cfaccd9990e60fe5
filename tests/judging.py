"""A fake server of chat completions in the test's process, which returns set answers, or none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_cli.tasks.workers import Question, Reply, Worker


def patient(hangs: Callable[[Question], bool]) -> Callable[[Worker, Question, float], Reply]:
    """Return a `Worker.ask` with its limit for questions that hang, and one that no busy machine needs for others."""
    ask = Worker.ask
    return lambda worker, question, seconds: ask(worker, question, seconds if hangs(question) else 300.0)


def said(content: Any, finish: str = "stop") -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}]})


class Server:
    """`answer` is given each question and returns the content of its answer; or (status, body) of a whole one, or None
    to say nothing until the test is over. `questions`, `headers`: what it was sent."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer, self.over = answer, threading.Event()
        self.questions: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.models: tuple[int, str] = (200, json.dumps({"data": [{"id": "judge"}]}))
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.headers.append(dict(self.headers))
                self.send(*server.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.questions.append(question := body["messages"][0]["content"])
                server.headers.append(dict(self.headers))
                answer = server.answer(question)
                if answer is None:
                    server.over.wait(60)
                else:
                    self.send(*answer if isinstance(answer, tuple) else (200, said(answer)))

            def send(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
