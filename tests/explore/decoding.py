"""A decoder of pages, written only from the description of their format."""

import base64
import json
import math
import re
import zlib

import numpy as np
import torch

from tests import textbook

BLOCK = r'<script type="text/plain" class="block" data-ranks="([\d ]*)">(.*?)</script>'


def facts_of(text):
    (facts,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    return json.loads(facts)


def decoded(text):
    """Yield for each block the weights in every window, (N, A, T, T), and which tokens are in the image, (N, T)."""
    found = iter(re.findall(BLOCK, text, re.S))
    for stage in facts_of(text)['stages']:
        for block in stage['blocks']:
            ranks, content = next(found)
            yield weights_of(
                [int(rank) for rank in ranks.split()],
                zlib.decompress(base64.b64decode(content)),
                stage['size'],
                tuple(block['window']),
                tuple(block['shift']),
            )


def weights_of(ranks, content, size, window, shift):
    parts = sum(ranks)
    offsets = [2 * side - 1 for side in window]
    sizes = [parts, parts, len(ranks) * math.prod(offsets)]
    floats = np.frombuffer(content, '<f4', sum(sizes)).astype(np.float64)
    factors, pad_factors, bias = torch.from_numpy(floats).split(sizes)
    bytes_of_planes = np.frombuffer(content, np.uint8, offset=4 * len(floats))
    is_smooth, planes = np.split(bytes_of_planes, [2 * parts])
    planes = planes_of(planes.reshape(2 * parts, *size), is_smooth)

    in_windows = textbook.partition(torch.from_numpy(planes).movedim(0, 2)[None].double(), window, shift)
    queries, keys = in_windows[0].split([parts, parts], -1)
    is_real = textbook.partition(torch.ones(1, *size, 1), window, shift)[0, :, :, 0] > 0
    regions = textbook.region_ids(*size, window, shift)
    penalty = textbook.REGION_PENALTY * (regions[:, :, None] != regions[:, None])
    tokens = torch.arange(math.prod(window))
    rows, columns = tokens // window[1], tokens % window[1]
    down = rows[:, None] - rows + window[0] - 1
    right = columns[:, None] - columns + window[1] - 1
    biases = bias.view(-1, *offsets)[:, down, right]

    weights = []
    by_head = [part.split(ranks, -1) for part in (queries, keys, factors, pad_factors)]
    for bias, q, k, factor, pad_factor in zip(biases, *by_head, strict=True):
        scores = (q * factor) @ k.mT
        of_padding = (q * pad_factor).sum(-1, keepdim=True)
        scores = torch.where(is_real[:, None], scores, of_padding)
        weights.append((scores + bias + penalty).softmax(-1))
    return torch.stack(weights, 1), is_real


def planes_of(stored, is_smooth):
    """Return signed numbers; smooth planes are stored as differences along rows, and down the first column."""
    planes = stored.astype(int)
    summed = planes.copy()
    summed[:, :, 0] = summed[:, :, 0].cumsum(1)
    summed = summed.cumsum(2)
    planes = np.where(is_smooth[:, None, None] > 0, summed, planes)
    return (planes + 128) % 256 - 128
