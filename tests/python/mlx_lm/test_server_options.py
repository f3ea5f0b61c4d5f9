"""Options of the server that cannot be: said at once, before a model is loaded."""

from __future__ import annotations

import pytest
from kvpool.mlx_lm import server as pooled_server
from mlx_lm import server

PAGED = ("--pool-cache", "paged")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--pool-memory", "lots"), "memory must be like '4GB', '512MiB' or 4096, got 'lots'"),
        (("--pool-memory", "0"), "memory must be >= 1, got 0"),
        (("--pool-block-size", "0"), "block_size must be >= 1, got 0"),
        ((*PAGED, "--pool-format", "int9"), "got 'int9'"),
        ((*PAGED, "--pool-age-policy", "int8"), "the first format needs a number of tokens"),
        (
            (*PAGED, "--pool-format", "int8", "--pool-age-policy", "fp16:4,int4"),
            "age_policy begins with 'fp16'",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_they_are_wrong_usage(monkeypatch, capsys, options, told):
    monkeypatch.setattr(server, "main", lambda: pytest.fail("the server began"))
    with pytest.raises(SystemExit) as stopped:
        pooled_server.main(["--model", "unread", *options])
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("kvpool.mlx_lm.server: error: ") and told in last
