"""The routes: parse bodies, call engines, return JSON and server-sent events."""

import asyncio
import hmac
import ipaddress
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]
from starlette.middleware import Middleware  # pyright: ignore[reportMissingImports]
from starlette.middleware.cors import CORSMiddleware  # pyright: ignore[reportMissingImports]
from starlette.requests import ClientDisconnect, Request  # pyright: ignore[reportMissingImports]
from starlette.responses import JSONResponse, Response  # pyright: ignore[reportMissingImports]
from starlette.routing import Route  # pyright: ignore[reportMissingImports]

from recurjax.data.chat import ChatTemplate
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.inference.engine.memory import StateSize
from recurjax.serving.answers import Answers, Choice
from recurjax.serving.bodies import (
    RequestOptions,
    read_body,
    read_messages,
    read_options,
    read_prompts,
    read_template_options,
)
from recurjax.serving.errors import RequestError
from recurjax.serving.metrics import Metrics
from recurjax.serving.talk import Events, RequestStream, WholeAnswer
from recurjax.serving.worker import Worker

T = TypeVar("T")
_ONLY_ITSELF = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may load: nothing but what this server answers."""

LARGEST_BODY = 16 * 2**20
"""Bytes of a body of any route, however much the slots hold."""
LARGEST_BODIES = 8 * LARGEST_BODY
"""Bytes of all bodies that are read at one time."""
BODY_SECONDS = 30.0
"""A body must have come within this time."""
LARGEST_TEXT = 2**22
"""Bytes of a body with a text to tokenize."""
MOST_IDS = 2**16
"""Tokens to write as text; a body's commas, brackets and texts beyond its prompts."""
_FIELDS_BYTES = 2**20
"""Bytes of a body beyond its texts: all other fields, and the JSON of messages."""
_ESCAPE_BYTES, _ID_BYTES = 6, 12
"""JSON's most bytes for a byte of text, \\u0061, and a token, 2147483647 and ", "."""
_SMALL_BODY = 2**16
"""Bytes of a body that the event loop itself reads: a thread would take longer."""
_LONGEST_TOKEN = 128
"""Bytes of text for each token of a slot, of tokenizers without a longest token."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A served model: a base, or one of its adapters on the same engine.

    Attributes:
      base: the name of the model that it is an adapter of; None: it is none.
      adapter: its number there, 0 of a base.
      template: None: the model has none, and no chat.
      ends: tokens at which its texts end; the tokenizer's EOS ends them too.
      sizes: what it keeps of texts of rising lengths, for the page.
      exits: the loops after which its tokens may leave; 0: they do not leave early.
      sampling: its own defaults, where a request names none.
    """

    name: str
    worker: Worker
    tokenizer: Tokenizer
    template: ChatTemplate | None
    base: str | None = None
    adapter: int = 0
    ends: tuple[int, ...] = ()
    sizes: Sequence[StateSize] = ()
    exits: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def longest_token(self) -> int:
        """The most bytes of text that count for a token."""
        return self.tokenizer.longest_token or _LONGEST_TOKEN


class App:
    """Answers requests to some models.

    Attributes:
      asgi: what a server runs.
    """

    def __init__(
        self,
        models: Mapping[str, Served],
        *,
        api_key: str | None = None,
        cors: Sequence[str] = (),
        hosts: Sequence[str] = LOOPBACK,
        addresses: bool = False,
    ):
        """Makes the routes.

        Args:
          models: by the names that clients use.
          api_key: required by every route but /health.
          cors: origins of web pages that may connect.
          hosts: names by which clients may call this server. A page of another site
            can reach it by a name of its own, which it lets point here.
          addresses: also answer to any IP address, which no such page can use.
        """
        self._models, self._key = dict(models), api_key
        self._cors, self._addresses = tuple(cors), addresses
        self._hosts = frozenset(name.lower() for name in hosts)
        self._held = 0  # bytes of bodies
        # Texts are tokenized and rendered here, so that a long one stops no other
        # request: the tokenizer's library lets go of the interpreter.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
        # Texts that only /tokenize takes: chats wait behind none of them.
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long")
        # Not the process's own registry: two servers in a process stay apart.
        self._registry = CollectorRegistry()
        self._metrics = Metrics(self._registry, lambda: self._workers())
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("/", "GET", self._page),
            ("/v1/models", "GET", self._list),
            ("/v1/completions", "POST", self._complete),
            ("/v1/chat/completions", "POST", self._chat),
            ("/tokenize", "POST", self._tokenize),
            ("/detokenize", "POST", self._detokenize),
            ("/tokenizer_info", "GET", self._tokenizer_info),
            ("/health", "GET", self._health),
            ("/metrics", "GET", self._show_metrics),
        ]
        self.asgi = Starlette(
            routes=[
                Route(path, self._guarded(answer), methods=[method])
                for path, method, answer in routes
            ],
            # Routes that are not there are answered in the same form.
            exception_handlers={404: _unknown_route, 405: _unknown_route},
            middleware=[
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(cors),
                    allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type"],
                )
            ]
            if cors
            else [],
        )

    async def _in_pool(
        self, function: Callable[..., T], *values: Any, long: bool = False
    ) -> T:
        """Runs a function of texts in a thread, of its own pool where it takes long."""
        pool = self._long_pool if long else self._pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, function, *values)

    def _workers(self) -> dict[str, Worker]:
        models = self._models.items()
        return {name: served.worker for name, served in models if not served.base}

    def _guarded(self, answer: Callable[[Request], Awaitable[Any]]):
        """Turns what is raised into JSON, and checks who asks."""

        async def guarded(request: Request) -> Any:
            try:
                self._check_origin(request)
                # Load balancers ask for health and have no key; the page asks its
                # reader for one.
                if request.url.path not in ("/health", "/"):
                    self._check_key(request)
                return await answer(request)
            except RequestError as error:
                failure = error
            except UserError as error:
                failure = RequestError(400, str(error))
            except ClientDisconnect:
                failure = RequestError(400, "the client has gone")
            except Exception as error:  # a fault of ours: clients get its name only
                traceback.print_exc()
                failure = RequestError(
                    500, f"the server failed: {type(error).__name__}"
                )
            return JSONResponse(failure.body(), status_code=failure.status)

        return guarded

    def _check_origin(self, request: Request) -> None:
        """Refuses web pages of other sites, which reach servers of this machine too.

        Raises:
          RequestError: 403.
        """
        host = request.headers.get("host")
        # Every browser names the host; a client that does not is none.
        if host is not None and not self._is_host(_name_of(host)):
            raise RequestError(
                403,
                f"this server has no name {host[:100]!r}: call it "
                f"{', '.join(sorted(self._hosts))}, or start it with "
                "--allowed-host",
            )
        origin = request.headers.get("origin")
        if origin is None or origin in self._cors or "*" in self._cors:
            return
        if origin.partition("://")[2] != host:
            raise RequestError(
                403,
                f"pages of {origin[:100]!r} may not call this server: start it "
                "with --cors ORIGIN to allow them",
            )

    def _is_host(self, name: str) -> bool:
        if name in self._hosts or "*" in self._hosts:
            return True
        return self._addresses and _is_address(name)

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        # In constant time: answers' times must not tell how much of it was right.
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise RequestError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
            )

    async def _read(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], T],
        *,
        largest: int,
        values: int = MOST_IDS,
        longest: int = LARGEST_BODY,
    ) -> T:
        """Returns what `read` makes of a body; it runs in the pool for a large one.

        Args:
          request: the request whose body.
          read: takes the JSON object.
          largest: bytes that the body may have.
          values: commas, brackets and texts that it may have.
          longest: bytes that a text may have.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            # A page of another site can send other kinds without a CORS preflight.
            raise RequestError(
                415,
                f"the content-type must be application/json, got {kind[:100]!r}",
            )
        largest = min(largest, LARGEST_BODY)
        data, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                # In pieces, so that a body too large is refused before it is held.
                async for part in request.stream():
                    size += len(part)
                    if size > LARGEST_BODY:
                        break
                    # The rest is read and dropped: many clients look for an answer
                    # only when they have sent all.
                    if size > largest:
                        continue
                    data += part
                    self._held += len(part)
                    if self._held > LARGEST_BODIES:
                        raise RequestError(
                            429,
                            "the server is receiving too many bodies at once: "
                            "try again later",
                        )
            if size > largest:
                raise RequestError(
                    413,
                    f"the body exceeds the {largest:,} bytes that {request.url.path} "
                    "accepts: send less",
                )
            parse = partial(read_body, data, values=values, longest=longest)
            if len(data) < _SMALL_BODY:
                return read(parse())
            return await self._in_pool(lambda: read(parse()))
        except TimeoutError:
            raise RequestError(
                408, f"the body did not arrive within {BODY_SECONDS:g} s"
            ) from None
        finally:
            self._held -= len(data)

    def _room(self, *, chat: bool) -> dict[str, int]:
        """Returns the limits of a body that a model can use, for `_read`.

        Raises:
          RequestError: 503: no model takes requests.
        """
        rooms, failures = [], []
        for served in self._models.values():
            try:
                texts = 1 if chat else served.worker.most_texts
                tokens = texts * served.worker.ready().config.length
            except RequestError as error:
                failures.append(error)
                continue
            token = _ESCAPE_BYTES * served.longest_token
            room = {
                "largest": _FIELDS_BYTES + tokens * max(token, _ID_BYTES),
                "values": MOST_IDS + tokens,
                # A prompt, or the ids of all that stand between two texts.
                "longest": _FIELDS_BYTES
                + max(tokens * token // texts, tokens * _ID_BYTES),
            }
            rooms.append(room)
        if not rooms:
            raise failures[0]
        return {name: max(room[name] for room in rooms) for name in rooms[0]}

    def _model(self, body: Mapping[str, Any]) -> Served:
        name = body.get("model")
        # With a single model, `model` may be omitted.
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        if not isinstance(name, str) or name not in self._models:
            known = ", ".join(self._models)
            if name is None:
                raise RequestError(
                    400, f"model is missing: name one of {known}", field="model"
                )
            shown = repr(name)[:100]
            raise RequestError(
                404,
                f"there is no model {shown}: name one of {known}",
                field="model",
                code="model_not_found",
            )
        return self._models[name]

    async def _page(self, request: Request) -> Response:
        text = resources.files("recurjax.serving").joinpath("page.html").read_text()
        headers = {"Content-Security-Policy": _ONLY_ITSELF}
        return Response(text, media_type="text/html", headers=headers)

    async def _list(self, request: Request) -> Response:
        rows = [
            {
                "id": served.name,
                "object": "model",
                "created": served.created,
                "owned_by": "recurjax",
                # As in vLLM: the adapter's base model.
                "parent": served.base,
                # For the page; other clients leave unknown fields alone.
                "recurjax": {
                    "chat": served.template is not None,
                    "sizes": [size._asdict() for size in served.sizes],
                    "exits": served.exits,
                },
            }
            for served in self._models.values()
        ]
        return JSONResponse({"object": "list", "data": rows})

    async def _health(self, request: Request) -> Response:
        for served in self._models.values():
            served.worker.ready()
        return JSONResponse({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        text = generate_latest(self._registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, lambda body: body, largest=LARGEST_TEXT)
        served, text = self._model(body), body.get("prompt")
        if not isinstance(text, str):
            raise RequestError(400, "prompt must be a string", field="prompt")
        # As in vLLM: BOS comes unless it is refused.
        special = body.get("add_special_tokens", True) is not False
        # A special token's name alone is that token, so that a client can learn its id;
        # inside a text a name is text.
        named = served.tokenizer.named_tokens
        if not special and text in named:
            ids = [named[text]]
        else:
            long = len(text) > _SMALL_BODY
            ids = await self._in_pool(
                _encode, served.tokenizer, text, special, long=long
            )
        answer = {"tokens": ids, "count": len(ids)}
        return await self._in_pool(JSONResponse, answer)

    async def _detokenize(self, request: Request) -> Response:
        def read(body: dict[str, Any]) -> tuple[Served, list[int]]:
            served, ids = self._model(body), body.get("tokens")
            most = served.tokenizer.vocabulary
            if (
                not isinstance(ids, list)
                or len(ids) > MOST_IDS
                or not all(
                    # `type`, not isinstance: true and false are ints to Python.
                    type(token) is int and 0 <= token < most
                    for token in ids
                )
            ):
                raise RequestError(
                    400,
                    f"tokens must be a list of at most {MOST_IDS:,} ids from 0 to "
                    f"{most - 1}",
                    field="tokens",
                )
            return served, ids

        largest = _FIELDS_BYTES + MOST_IDS * _ID_BYTES
        served, ids = await self._read(request, read, largest=largest)
        text = await self._in_pool(
            served.tokenizer.decode, ids, long=len(ids) > _SMALL_BODY
        )
        return await self._in_pool(JSONResponse, {"prompt": text})

    async def _tokenizer_info(self, request: Request) -> Response:
        served = self._model(dict(request.query_params))
        tokenizer = served.tokenizer
        return JSONResponse(
            {
                "model": served.name,
                "vocabulary": tokenizer.vocabulary,
                # The token that begins each text; a template may write another BOS.
                "bos": tokenizer.bos,
                "eos": tokenizer.eos,
                # By name too, as in vLLM; None: there is none, or no name.
                "bos_token": tokenizer.names.get("bos_token"),
                "eos_token": tokenizer.names.get("eos_token"),
                "hash": tokenizer.hash,
                "chat_template": None
                if served.template is None
                else served.template.source,
            }
        )

    async def _complete(self, request: Request) -> Any:
        def read(body: dict[str, Any]) -> tuple[Served, RequestOptions, list[Any]]:
            served = self._model(body)
            options = read_options(body, chat=False, defaults=served.sampling)
            prompts = read_prompts(body)
            check_budget(served, prompts, n=options.n)
            return served, options, list(prompts)

        served, options, texts = await self._read(
            request, read, **self._room(chat=False)
        )
        scored = options.echo and options.top_logprobs is not None
        served.worker.ready()
        if scored and served.worker.scorer is None:
            raise RequestError(
                400,
                "this server returns no log-probabilities of prompts: leave echo "
                "or logprobs out, or start it with --echo-logprobs on one device",
                field="echo",
            )
        prompts: list[list[int]] = []
        for prompt in texts:
            if isinstance(prompt, str):
                prompt = await self._in_pool(_encode, served.tokenizer, prompt, True)
            prompts.append(prompt)
        begins = [""] * len(prompts)
        if options.echo:
            begins = [
                await self._in_pool(served.tokenizer.decode, ids) for ids in prompts
            ]
        return self._answer(served, prompts, options, begins=begins, scored=scored)

    async def _chat(self, request: Request) -> Any:
        def read(body: dict[str, Any]) -> tuple[Served, RequestOptions, Any, Any]:
            served = self._model(body)
            options = read_options(body, chat=True, defaults=served.sampling)
            messages, arguments = read_messages(body), read_template_options(body)
            text = "".join(message["content"] for message in messages)
            check_budget(served, [text], n=options.n, field="messages")
            return served, options, messages, arguments

        served, options, messages, arguments = await self._read(
            request, read, **self._room(chat=True)
        )
        if served.template is None:
            raise RequestError(
                400,
                f"{served.name} has no chat template: use /v1/completions, or "
                "start the server with --template",
            )
        # OpenAI's newer name of the system's role, for templates that know the older.
        if "developer" not in served.template.source:
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        # Names of special tokens in the messages stay text.
        encode = partial(
            served.template.encode, messages, served.tokenizer, variables=arguments
        )
        ids = await self._in_pool(encode)
        return self._answer(served, [ids], options, chat=True)

    def _answer(
        self,
        served: Served,
        prompts: list[list[int]],
        options: RequestOptions,
        *,
        begins: Sequence[str] = ("",),
        chat: bool = False,
        scored: bool = False,
    ) -> Any:
        """Submits every prompt n times, and answers in one piece or as they come."""
        engine = served.worker.ready()
        top = options.top_logprobs or 0
        if top > engine.config.top_logprobs:
            raise RequestError(
                400,
                f"logprobs must be at most {engine.config.top_logprobs}, the "
                f"log-probabilities per token that this server returns, got {top}",
                field="logprobs",
            )
        # A threshold of 0 is a threshold too.
        exit_options = {
            "exit": options.threshold is not None,
            "return_exits": options.exits,
        }
        for name, present in exit_options.items():
            if present and engine.config.exit is None:
                raise RequestError(
                    400,
                    f"{served.name} is served without early exits: leave {name} out, "
                    "or start the server with --exit",
                    field=name,
                )
        requests = []
        for prompt in prompts:
            ids = np.asarray(prompt, np.int64)
            # The last token is sampled, not read: it needs no place in the cache.
            room = max(engine.config.length - len(prompt) + 1, 1)
            limit = room if options.max_tokens is None else options.max_tokens
            # Each choice draws from a stream of its own under the request's seed.
            for choice in range(options.n):
                settings = options.request_settings(
                    limit=limit,
                    choice=choice,
                    ends=served.ends,
                    adapter=served.adapter,
                )
                requests.append((ids, settings))
        if any(len(prompt) == 0 for prompt in prompts):
            raise RequestError(
                400, "prompt has no tokens: send at least one", field="prompt"
            )
        streams = served.worker.submit(
            requests, scored=scored, continues=options.max_tokens != 0
        )
        tokenizer = served.tokenizer
        choices = [
            Choice(
                index=index,
                stream=stream,
                begin=begins[index // options.n],
            )
            for index, stream in enumerate(streams)
        ]
        answers = Answers(
            name=served.name,
            chat=chat,
            options=options,
            tokenizer=tokenizer,
            prompt_tokens=sum(map(len, prompts)),
        )
        talk = RequestStream(served.worker, choices, self._metrics, served.name)
        if options.stream:
            return Events(talk, answers)
        return WholeAnswer(talk, answers)


async def _unknown_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    said = f"there is no {request.method} {request.url.path}"
    return JSONResponse(RequestError(status, said).body(), status_code=status)


def check_budget(
    served: Served, prompts: Sequence[str | list[int]], *, n: int, field: str = "prompt"
) -> None:
    """Refuses a request by its lengths, before any work is done for it.

    Its texts (prompts times n) are at most the model's slots and places in the queue;
    a prompt has at most a slot's tokens, and a text at most their bytes.

    Args:
      served: the served model.
      prompts: texts or tokens.
      n: choices of each.
      field: field of the body, for the message.

    Raises:
      RequestError: 400.
    """
    served.worker.check_count(n * len(prompts))
    room = served.worker.ready().config.length
    longest = served.longest_token
    for prompt in prompts:
        if isinstance(prompt, str) and len(prompt.encode()) > room * longest:
            raise RequestError(
                400,
                f"{field} has {len(prompt.encode()):,} bytes and a slot has "
                f"{room:,} tokens of at most {longest} bytes each: send a shorter "
                "text",
                field=field,
            )
        if not isinstance(prompt, str) and len(prompt) > room:
            raise RequestError(
                400,
                f"{field} has {len(prompt):,} tokens and a slot has {room:,}: send "
                "fewer",
                field=field,
            )


def _name_of(host: str) -> str:
    """Returns the name in a Host header, without port and brackets."""
    name = host.rpartition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removeprefix("[").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _encode(tokenizer: Tokenizer, text: str, bos: bool) -> list[int]:
    ids = tokenizer.encode(text).tolist()
    # An empty text still needs a token to read: use BOS.
    if tokenizer.bos is None or (ids and not bos):
        return ids
    return [tokenizer.bos, *ids]
