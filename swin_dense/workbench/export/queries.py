"""Traceable versions of mmdet's detectors with queries, and of the heads of MaskFormer and Mask2Former.

Encoders, decoders and heads are the frameworks' own modules, except for the parts that ``deformable`` replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.workbench.export.deformable import (
    Sizes,
    as_tokens,
    centres,
    encoded_levels,
    reference_points,
    replace_parts,
)
from swin_dense.workbench.export.detectors import Detector

# Of the proposals of mmdet's encoders, as fractions of the image: the side at the first level, and their distance from
# the border, outside of which they are not used.
_SIDE_OF_FIRST_LEVEL = 0.05
_MARGIN = 0.01


class QueryDetector(Detector):
    """DINO and Deformable DETR. Parts of the detector are replaced in place."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        replace_parts(detector)
        self.detector.encoder.get_encoder_reference_points = reference_points
        self.detector.gen_encoder_output_proposals = self._proposals

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Return boxes (N, 4) in pixels of the image, scores (N,) and labels (N,) int32, by descending score."""
        model = self.detector
        head = model.bbox_head
        maps = self.maps(img)
        sizes = [(x.shape[2], x.shape[3]) for x in maps]
        no_padding = img.new_ones(1, len(maps), 2)
        common = {'spatial_shapes': sizes, 'level_start_index': None, 'valid_ratios': no_padding}
        tokens = torch.cat([as_tokens(x) for x in maps], 1)
        places = encoded_levels(model.positional_encoding, maps, model.level_embed)
        memory = model.forward_encoder(tokens, None, places, **common)['memory']
        queries, _ = model.pre_decoder(memory, None, sizes)
        decoded = model.forward_decoder(memory_mask=None, **queries, **common)
        logits, boxes = last_layer(head, **decoded)
        most = head.test_cfg.get('max_per_img', len(logits))
        score, index = logits.sigmoid().flatten().topk(most)
        box = _corners(boxes[index // head.num_classes], *img.shape[2:])
        label = index % head.num_classes
        return box, score, label.int()

    def _proposals(self, memory: Tensor, memory_mask: None, spatial_shapes: Sizes) -> tuple[Tensor, Tensor]:
        """Reimplement ``gen_encoder_output_proposals`` for an image without padding, with its constants."""
        boxes = []
        for level, (height, width) in enumerate(spatial_shapes):
            places = centres(height, width)
            sides = torch.full_like(places, _SIDE_OF_FIRST_LEVEL * 2.0**level)
            boxes.append(torch.cat([places, sides], 1))
        box = torch.cat(boxes)[None]
        is_inside = (box > _MARGIN) & (box < 1 - _MARGIN)
        is_valid = is_inside.all(-1, keepdim=True)
        logit = torch.log(box / (1 - box))
        box = torch.where(is_valid, logit, float('inf'))
        memory = torch.where(is_valid, memory, 0.0)
        memory = self.detector.memory_trans_fc(memory)
        return self.detector.memory_trans_norm(memory), box


def _corners(boxes: Tensor, height: int, width: int) -> Tensor:
    """Convert boxes (N, 4), centres and sides as fractions of the image, to corners in pixels, cut at its border."""
    centre, sides = boxes.split(2, 1)
    corners = torch.cat([centre - 0.5 * sides, centre + 0.5 * sides], 1)
    x = (corners[:, 0::2] * width).clamp(0, width)
    y = (corners[:, 1::2] * height).clamp(0, height)
    return torch.stack([x, y], 2).flatten(1)


class MaskDetector(Detector):
    """MaskFormer and Mask2Former of mmdet. ``runtime.queries`` turns the outputs into predictions."""

    OUTPUTS = ('classes', 'masks')

    def __init__(self, detector: nn.Module) -> None:
        super().__init__(detector)
        replace_parts(detector)

    def forward(self, img: Tensor) -> tuple[Tensor, Tensor]:
        """Return class probabilities (Q, C + 1), the last for no object, and mask logits (Q, h, w), of all queries."""
        classes, masks = classes_and_masks(self.detector.panoptic_head, self.maps(img))
        return classes[0].softmax(-1), masks[0]


def classes_and_masks(head: Any, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return class logits (B, Q, C + 1) and mask logits (B, Q, h, w) of the last layer of a head."""
    if hasattr(head, 'decoder_input_projs'):  # Mask2Former
        classes, masks = head(maps, None)
        return classes[-1], masks[-1]
    # MaskFormer: `forward` without the loop over the images of a batch, whose padding it reads
    features, memory = head.pixel_decoder(maps, None)
    memory = head.decoder_input_proj(memory)
    query = head.query_embed.weight.expand(memory.shape[0], -1, -1)
    layers = head.transformer_decoder(
        query=torch.zeros_like(query),
        key=as_tokens(memory),
        value=as_tokens(memory),
        query_pos=query,
        key_pos=as_tokens(head.decoder_pe(None, input=memory)),
        key_padding_mask=None,
    )
    out = layers[-1]
    masks = torch.einsum('bqc,bchw->bqhw', head.mask_embed(out), features)
    return head.cls_embed(out), masks


def last_layer(head: Any, hidden_states: Tensor, references: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return class logits (Q, C) and boxes (Q, 4), as x, y, width and height from 0 to 1, of the head's last layer.

    The head itself would also compute all other layers.
    """
    from mmdet.models.layers import inverse_sigmoid

    last = len(hidden_states) - 1
    hidden = hidden_states[last, 0]
    known = inverse_sigmoid(references[last][0])
    known = F.pad(known, (0, 4 - known.shape[1]))
    boxes = head.reg_branches[last](hidden) + known
    logits = head.cls_branches[last](hidden)
    return logits, boxes.sigmoid()
