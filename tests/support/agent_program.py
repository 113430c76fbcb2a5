#!/usr/bin/env python3
"""An agent as a program, with the standard library only: one call of the model, and the reward as the last line."""

import json
import os
import sys
import urllib.request

row = json.loads(sys.stdin.readline())
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as response:
    text = json.load(response)["choices"][0]["message"]["content"] or ""
print("noise", file=sys.stderr)
print("the answer has", len(text), "characters")
print(len(text) % 5 / 4)
