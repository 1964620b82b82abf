"""A TPU slice's metadata server on loopback, and a process that believes in it.

As a script it is `recurjax ...` on a machine that jax takes for a TPU VM.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

PREFIX = "/computeMetadata/v1/instance/attributes/"


@contextmanager
def metadata_server(attributes: dict[str, str]) -> Iterator[str]:
    """Serves a host's attributes; yields what GCE_METADATA_IP is to be set to."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            text = attributes.get(self.path.removeprefix(PREFIX))
            known = self.headers["Metadata-Flavor"] == "Google" and text is not None
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def host(number: int, hosts: int) -> dict[str, str]:
    """Returns the attributes of a host of a slice, as a queued resource has them."""
    endpoints = ",".join(f"id{n}:{n}:127.0.0.1" for n in range(hosts))
    return {
        "agent-worker-number": str(number),
        "worker-network-endpoints": endpoints,
        "tpu-env": f"WORKER_ID: '{number}'\nACCELERATOR_TYPE: 'v5litepod-16'",
    }


if __name__ == "__main__":
    # With JAX_FORCE_TPU_INIT jax takes this for a TPU VM; that there are no chips makes
    # it tell itself not to ask the metadata server.
    import jax  # noqa: F401

    from recurjax.cli.main import main

    os.environ.pop("TPU_SKIP_MDS_QUERY", None)
    sys.exit(main())
