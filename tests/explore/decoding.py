"""A decoder of pages, written from the description of their format alone."""

import base64
import json
import math
import re
import zlib

import numpy as np
import torch

from tests import textbook


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
    """The numbers of one block, from which ``weights`` computes its attention."""

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

    def weights(self):
        """Return the attention weights in every window, (N, A, T, T), and which tokens are in the image, (N, T)."""
        window, shift = tuple(self.window), tuple(self.shift)

        def in_windows(planes):
            return textbook.partition(torch.from_numpy(planes).movedim(0, 2)[None].double(), window, shift)[0]

        queries, keys = in_windows(self.queries), in_windows(self.keys)
        is_real = in_windows(np.ones((1, *self.size)))[:, :, 0] > 0
        regions = textbook.region_ids(*self.size, window, shift)
        rows, columns = (torch.arange(math.prod(window)) // window[1], torch.arange(math.prod(window)) % window[1])
        down, right = (place[:, None] - place + side - 1 for place, side in zip((rows, columns), window, strict=True))
        weights, first = [], 0
        for head, rank in enumerate(self.ranks):
            parts = slice(first, first + rank)
            first += rank
            factors, pad_factors = (torch.from_numpy(one[parts]) for one in (self.factors, self.pad_factors))
            scores = (queries[..., parts] * factors) @ keys[..., parts].mT
            of_padding = (queries[..., parts] * pad_factors).sum(-1, keepdim=True)
            scores = torch.where(is_real[:, None], scores, of_padding) + torch.from_numpy(self.bias[head])[down, right]
            scores += textbook.REGION_PENALTY * (regions[:, :, None] != regions[:, None])
            weights.append(scores.softmax(-1))
        return torch.stack(weights, 1), is_real
