"""The page at /: it loads nothing from elsewhere, and its logic does what it says."""

import http.client
import json
import re
import shutil
import subprocess
from importlib import resources

import pytest

PAGE = resources.files("recurjax.serving").joinpath("page.html").read_text()
SIZES = [
    {"tokens": 1, "state": 10, "attention": 100},
    {"tokens": 4, "state": 10, "attention": 400},
    {"tokens": 6, "state": 30, "attention": 600},
]
LOGIC = """
const check = (got, want) => {
  if (JSON.stringify(got) !== JSON.stringify(want))
    throw new Error(JSON.stringify(got) + " is not " + JSON.stringify(want));
};
const whole = 'data: {"a":1}\\n\\ndata: {"b":"x\\\\n\\\\ny"}\\n\\ndata: [DONE]\\n\\n';
for (let cut = 0; cut <= whole.length; cut++) {
  const read = eventReader();
  const events = [...read(whole.slice(0, cut)), ...read(whole.slice(cut))];
  check(events, [{ a: 1 }, { b: "x\\n\\ny" }]);
}
check(sizeAt(SIZES, 2), { state: 10, attention: 200 });
check(sizeAt(SIZES, 5), { state: 20, attention: 500 });
check(sizeAt(SIZES, 6), { state: 30, attention: 600 });
check(sizeAt(SIZES, 60), { state: 30, attention: 600 });
check(sizeAt([], 6), null);
check([inBytes(7), inBytes(2048), inBytes(3 << 20)], ["7 bytes", "2.0 KiB", "3.0 MiB"]);
const mine = { role: "user", content: "a", x: 1 };
const said = [mine, { role: "assistant", content: "b" }];
const settings = {
  system: "s", temperature: "0", top_k: "", max_tokens: "5", key: "k",
};
const common = {
  stream: true, stream_options: { include_usage: true }, return_token_ids: true,
};
const chat = { id: "m", recurjax: { chat: true } };
check(asked(chat, said, settings), ["/v1/chat/completions", {
  model: "m", ...common, temperature: 0, max_tokens: 5, messages: [
    { role: "system", content: "s" }, { role: "user", content: "a" },
    { role: "assistant", content: "b" },
  ],
}]);
const base = { id: "m", recurjax: { chat: false } };
check(asked(base, said, {}), ["/v1/completions", {
  max_tokens: 200, model: "m", ...common, prompt: "ab",
}]);
const left = { ...settings, exit: "0.5" };
check(asked(chat, said, left)[1].exit, undefined);
const early = { id: "m", recurjax: { chat: true, exits: 3 } };
const { exit, return_exits } = asked(early, said, left)[1];
check([exit, return_exits], [0.5, true]);
check(asked(early, said, settings)[1].exit, undefined);
check(titleOf({ messages: [] }), "New conversation");
check(titleOf({ messages: said }), "a");
check(readTalks(JSON.stringify([{ messages: said }, { messages: [{}] }, 3])).length, 1);
const shown = [], compiling = { error: { message: "is being compiled" } };
const ask = async () => ({ ok: shown.length > 1, json: async () => compiling });
untilReady(ask, (text) => shown.push(text), async () => {}).then(() =>
  check(shown, ["is being compiled (0 s)", "is being compiled (1 s)", ""]));
check([readTalks("{"), readTalks(null), readTalks('"x"')], [[], [], []]);
"""


def scripts() -> dict[str, str]:
    matches = re.findall(r'<script id="(\w+)">\n(.*?)</script>', PAGE, re.DOTALL)
    return dict(matches)


def node(*, check: bool, text: str) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node, which runs the page's script")
    command = ["node", "--check", "-"] if check else ["node", "-"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_page_is_served_without_a_key_and_loads_nothing_from_elsewhere(server):
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    link.request("GET", "/")
    answer = link.getresponse()
    assert answer.read().decode() == PAGE
    assert answer.headers.get_content_type() == "text/html"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    link.close()
    assert not re.search(r"https?://|\bsrc=|@import|url\(", PAGE)
    # A text of the model's is never markup.
    assert "innerHTML" not in PAGE and "insertAdjacentHTML" not in PAGE


def test_every_element_that_the_script_asks_for_is_there():
    used = set(re.findall(r'\$\("([\w-]+)"\)', PAGE))
    result = set(re.findall(r'\bid(?:="|: ")([\w-]+)"', PAGE))
    assert used and used <= result


def test_the_pages_logic():
    result = scripts()
    assert list(result) == ["logic", "page"]
    node(check=True, text=result["page"])
    sizes = f"const SIZES = {json.dumps(SIZES)};"
    node(check=False, text=result["logic"] + sizes + LOGIC)
