"""A decoder of pages, written from the description of their format alone."""

import base64
import json
import math
import re
import zlib

import numpy as np


def facts_of(text):
    (facts,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    return json.loads(facts)


def block_bytes(text):
    return [
        (list(map(int, ranks.split())), base64.b64decode(content))
        for ranks, content in re.findall(
            r'<script type="text/plain" class="block" data-ranks="([\d ]*)">(.*?)</script>', text, re.S
        )
    ]


class Decoded:
    """The numbers of one block, from which ``weights`` computes the attention of one token at a time."""

    def __init__(self, facts, blocks, stage, block):
        before = sum(len(one['blocks']) for one in facts['stages'][:stage])
        self.ranks, content = blocks[before + block]
        self.size = facts['stages'][stage]['size']
        self.window, self.shift = (facts['stages'][stage]['blocks'][block][name] for name in ('window', 'shift'))
        content = zlib.decompress(content)
        heads, parts = len(self.ranks), sum(self.ranks)
        offsets = [2 * side - 1 for side in self.window]
        floats = np.frombuffer(content, '<f4', 2 * parts + heads * math.prod(offsets)).astype(np.float64)
        self.factors, self.pad_factors = floats[:parts], floats[parts : 2 * parts]
        self.bias = floats[2 * parts :].reshape(heads, *offsets)
        rest = np.frombuffer(content, np.uint8, offset=4 * len(floats))
        planes = rest[2 * parts :].reshape(2 * parts, *self.size).astype(int)
        for plane, is_smooth in zip(planes, rest[: 2 * parts], strict=True):
            if is_smooth:
                plane[:, 0] = plane[:, 0].cumsum()
                plane[:] = plane.cumsum(1)
        planes = (planes + 128) % 256 - 128
        self.queries, self.keys = planes[:parts], planes[parts:]

    def weights(self, row, column):
        """Return a token's attention weights over the map, (A, H, W), computed by definition in loops."""
        padded = [-(-side // step) * step for side, step in zip(self.size, self.window, strict=True)]

        def rolled(position, axis):
            return (position - self.shift[axis]) % padded[axis]

        token = (row, column)
        shares = np.zeros((len(self.ranks), *self.size))
        first = 0
        for head, rank in enumerate(self.ranks):
            parts = slice(first, first + rank)
            first += rank
            scores = {}
            for y in range(padded[0]):
                for x in range(padded[1]):
                    key = (y, x)
                    if any(
                        rolled(key[a], a) // self.window[a] != rolled(token[a], a) // self.window[a]
                        or rolled(key[a], a) - rolled(token[a], a) != key[a] - token[a]
                        for a in range(2)
                    ):
                        continue
                    query = self.queries[parts, row, column]
                    if y < self.size[0] and x < self.size[1]:
                        score = (self.factors[parts] * query * self.keys[parts, y, x]).sum()
                    else:
                        score = (self.pad_factors[parts] * query).sum()
                    offset = [token[a] - key[a] + self.window[a] - 1 for a in range(2)]
                    scores[key] = score + self.bias[head, offset[0], offset[1]]
            largest = max(scores.values())
            total = sum(math.exp(score - largest) for score in scores.values())
            for (y, x), score in scores.items():
                if y < self.size[0] and x < self.size[1]:
                    shares[head, y, x] = math.exp(score - largest) / total
        return shares
