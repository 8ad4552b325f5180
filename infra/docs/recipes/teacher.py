"""A teacher on a CPU: a model folder behind /v1/completions, with the log-probabilities of a prompt that `distill` needs.

python infra/docs/recipes/teacher.py FOLDER PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class TeacherServer(HTTPServer):
    """Answers one request at a time; the others wait."""

    request_queue_size = 256

    def __init__(self, port: int, folder: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__(("127.0.0.1", port), Answer)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # the folder's
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it."""
        import torch

        with torch.inference_mode():
            found = self.model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
        values: list[float] = found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return values


class Answer(BaseHTTPRequestHandler):
    server: TeacherServer

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        logprobs = self.server.logprobs(tokens)
        told = [
            {str(token): {"logprob": logprob, "decoded_token": self.server.tokenizer.decode([token])}}
            for token, logprob in zip(tokens[1:], logprobs, strict=True)
        ]
        body = json.dumps({"choices": [{"prompt_logprobs": [None, *told]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log no request."""


if __name__ == "__main__":
    TeacherServer(int(sys.argv[2]), sys.argv[1]).serve_forever()
