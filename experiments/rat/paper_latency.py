"""The figures of the paper's Tables 6, 7 and 8, in ms on one H100 of a GH200."""

from typing import Literal

Table = Literal["training", "forward", "decode"]

_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072, 262144)

_ROWS = {
    ("training", "rnn", None): "77.00 78.42 77.50 83.50 115.83 130.62 195.30",
    ("training", "rat128", None): "150.19 150.76 156.65 154.52 159.94 165.07 206.46",
    ("training", "rat64", None): "146.25 148.46 151.10 155.83 165.58 177.78 227.76",
    ("training", "rat16", None): "150.08 153.63 158.98 173.89 202.00 249.79 378.11",
    ("training", "attention", None): (
        "122.06 176.44 277.61 474.90 877.14 1713.82 3417.48"
    ),
    ("forward", "rnn", None): "24.93 24.75 25.32 27.09 30.54 39.40 56.16",
    ("forward", "rat128", None): "44.74 44.78 45.09 45.50 46.67 48.62 51.75",
    ("forward", "rat64", None): "43.46 44.27 44.27 44.83 47.08 50.83 57.38",
    ("forward", "rat16", None): "44.03 44.90 45.53 51.08 57.31 71.18 99.53",
    ("forward", "attention", None): "36.93 52.71 80.21 135.68 245.14 494.62 997.50",
    ("decode", "rnn", 64): "0.36 0.33 0.34 0.33 0.33 0.33 0.33",
    ("decode", "rat128", 64): "0.62 0.60 0.61 0.63 0.66 0.66 0.68",
    ("decode", "rat64", 64): "0.67 0.64 0.66 0.70 0.73 0.74 1.03",
    ("decode", "rat16", 64): "0.62 0.65 0.64 0.68 1.04 1.82 3.42",
    ("decode", "attention", 64): "1.15 1.73 3.33 6.66 12.94 26.8 OOM",
    ("decode", "rnn", 512): "0.35 0.34 0.33 0.33 0.34 0.34 0.33",
    ("decode", "rat128", 512): "0.63 0.64 0.66 0.75 1.17 2.44 3.46",
    ("decode", "rat64", 512): "0.70 0.68 0.74 1.16 2.41 3.44 6.69",
    ("decode", "rat16", 512): "0.75 1.22 2.45 3.48 6.73 13.09 25.76",
    ("decode", "attention", 512): "6.56 12.89 25.84 OOM OOM OOM OOM",
    ("decode", "rnn", 1024): "0.36 0.36 0.35 0.35 0.35 0.36 0.35",
    ("decode", "rat128", 1024): "0.73 0.75 0.95 1.35 2.54 4.64 6.98",
    ("decode", "rat64", 1024): "0.74 0.94 1.35 2.48 4.67 7.02 13.45",
    ("decode", "rat16", 1024): "1.38 2.56 4.63 7.04 13.51 26.43 OOM",
    ("decode", "attention", 1024): "13.04 25.70 OOM OOM OOM OOM OOM",
}

PAPER: dict[tuple[Table, str, int | None, int], str] = {
    (table, layer, batch, length): figure
    for (table, layer, batch), figures in _ROWS.items()
    for length, figure in zip(_LENGTHS, figures.split(), strict=True)
}
"""By table, layer, decode's batch and T."""
