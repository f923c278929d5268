# SPDX-License-Identifier: Apache-2.0
"""Rows of feature values in which every legal pair of values of two features occurs."""

import itertools


def pairs_of(features, legal=lambda row: True):
    """Every pair ((feature, value), (feature, value)) that some legal row may hold; values are named by index."""
    return {((a, x), (b, y)) for a, b in itertools.combinations(features, 2)
            for x in range(len(features[a])) for y in range(len(features[b])) if legal({a: features[a][x], b: features[b][y]})}


def covered_by(features, row):
    at = [(name, features[name].index(value)) for name, value in row.items()]
    return set(itertools.combinations(at, 2))


def covering(features, legal=lambda row: True):
    """Greedy and deterministic: each row starts from the first pair still missing and then takes, feature by
    feature, the value that adds most missing pairs. `legal` says whether a row in part (a dict of some features) may be completed."""
    missing = pairs_of(features, legal)
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=lambda pair: [(list(features).index(n), v) for n, v in pair])
        chosen = {a: x, b: y}
        for name, values in features.items():
            if name in chosen:
                continue
            def gain(index):
                return sum(tuple(sorted(((name, index), other), key=lambda f: list(features).index(f[0]))) in missing
                           for other in chosen.items())
            candidates = [i for i in range(len(values))
                          if legal({**{n: features[n][v] for n, v in chosen.items()}, name: values[i]})]
            start = len(rows) % len(values)  # ties rotate, so that no value is favoured
            chosen[name] = max(candidates, key=lambda i: (gain(i), -((i - start) % len(values))))
        row = {name: features[name][chosen[name]] for name in features}
        rows.append(row)
        missing -= covered_by(features, row)
    return rows
