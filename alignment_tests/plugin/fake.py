"""A stand-in for an SGLang server with our model, in this process: its answers over HTTP, and faults on request."""

import base64
import io
import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from minitransformer.errors import InputError
from minitransformer.learner.learner import Learner
from minitransformer.plugins.sglang.checksums import checksums
from minitransformer.plugins.sglang.identity import identity
from minitransformer.plugins.sglang.weights import Receiver
from minitransformer.sampler.sampler import Sampler
from minitransformer.sampler.sequence import SamplingParams


class Unpickler(pickle.Unpickler):
    """As strict as SGLang's."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in ("torch", "builtins", "collections", "functools", "multiprocessing"):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class Fake:
    """model: what it serves. stock: it can't tell checksums. fault: what happens to updates: '', 'refuse', 'hang' (4 s,
    nothing loaded), 'half' (a part is written, the connection ends), 'die' (the whole server ends), 'silent' (all is
    written, the connection ends)."""

    def __init__(self, model: Any, form: Any = None, stock: bool = False) -> None:
        self.model, self.form, self.stock, self.fault, self.told = model, form, stock, "", {}
        self.receiver = Receiver(model, form)
        self.receiver.missing = set()
        self.updates: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

            def answer(self, body: Any) -> None:
                try:
                    status, said = fake.reply(self.path, body)
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                content = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # server_close waits: a thread in native code at the end of Python aborts it
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {"version": "0.5.17", "model_path": "fake"} | self.told
        if path == "/weights_checker":
            if self.stock:
                return 400, {"success": False, "message": f"Unsupported action='{body['action']}'"}
            sums = checksums(self.model) if body["action"] == "checksum" else {}
            return 200, {"ranks": [{"checksums": sums | identity(self.model, self.form and self.form.name)}]}
        if path == "/generate":
            return 200, self.generate(body)
        if path.startswith("/flush_cache"):
            return 200, {}
        if "group" in path:
            return 404, {"detail": "Not Found"}
        self.updates.append(path)
        return self.update(self.tensors(path, body))

    def tensors(self, path: str, body: Any) -> list:
        if path == "/update_weights_from_tensor":
            return Unpickler(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0]))).load()
        assert path == "/update_weights_from_disk", path
        return list(load_file(Path(body["model_path"]) / "model.safetensors").items())

    def update(self, tensors: list) -> tuple[int, Any]:
        if self.fault == "refuse":
            return 400, {"success": False, "message": "no"}
        if self.fault == "hang":
            time.sleep(4)
        if self.fault == "half":
            self.receiver.load(tensors[: len(tensors) // 2], update=True)
        if self.fault == "silent":
            self.receiver.load(tensors, update=True)
        if self.fault == "die":
            threading.Thread(target=self.__exit__).start()
            time.sleep(0.2)
        if self.fault:
            raise ConnectionAbortedError
        try:
            self.receiver.load(tensors, update=True)
        except InputError as error:
            return 400, {"success": False, "message": f"{error}. Nothing was written"}
        return 200, {"success": True, "message": "Success"}

    def generate(self, body: Any) -> list[dict]:
        prompts, params = body["input_ids"], body["sampling_params"]
        params = params if isinstance(params, list) else [params] * len(prompts)
        asked = [
            SamplingParams(
                p["max_new_tokens"], p["temperature"], max(p.get("top_k", 0), 0), p.get("top_p", 1.0),
                p.get("sampling_seed", 0), tuple(p.get("stop_token_ids", ())), p["ignore_eos"],
            )
            for p in params
        ]  # fmt: skip
        answers = []
        for prompt, c in zip(prompts, Sampler(self.model).generate(prompts, asked), strict=True):
            first = [[None, prompt[0], None]]
            if body["logprob_start_len"] == 0 and len(prompt) > 1:
                (scores,) = Learner(self.model).score([prompt], [1])
                first += [[x, i, None] for x, i in zip(scores.tolist(), prompt[1:], strict=True)]
            meta = {
                "input_token_logprobs": first, "finish_reason": {"type": c.finish_reason},
                "output_token_logprobs": [[x, i, None] for x, i in zip(c.log_probs, c.token_ids, strict=True)],
            }  # fmt: skip
            answers.append({"output_ids": c.token_ids, "meta_info": meta})
        return answers
