// The computations of the page as pure functions that do not use the DOM: geometry, unpacking, attention.

/** Return the origin of every slot of a token's window.
 *
 * A slot is {row, column, isPadding, region}; windows are laid over the map after it has been rolled by minus the shift.
 */
function windowOf(stage, block, row, column) {
  const [height, width] = stage.size;
  const vertical = axisOf(height, block.window[0], block.shift[0], row);
  const horizontal = axisOf(width, block.window[1], block.shift[1], column);
  const slots = [];
  for (const y of vertical.slots) {
    for (const x of horizontal.slots) {
      slots.push({
        row: y.position,
        column: x.position,
        isPadding: y.position >= height || x.position >= width,
        region: 3 * y.region + x.region,
      });
    }
  }
  return {
    slots,
    query: vertical.inside * block.window[1] + horizontal.inside,
    index: [vertical.index, horizontal.index],
  };
}

/** Return, along one axis, the window of a position, the position inside it, and the window's slots. */
function axisOf(length, window, shift, position) {
  const padded = Math.ceil(length / window) * window;
  const rolled = (position - shift + padded) % padded;
  const index = Math.floor(rolled / window);
  const slots = [];
  for (let i = index * window; i < (index + 1) * window; i++) {
    slots.push({ position: (i + shift) % padded, region: regionOf(i, padded, window, shift) });
  }
  return { index, inside: rolled - index * window, slots };
}

/** Return, along one axis, the region of a position; tokens of different regions must not attend to each other. */
function regionOf(rolled, padded, window, shift) {
  return shift === 0 ? 0 : (rolled >= padded - window) + (rolled >= padded - shift);
}

/** Return (height, width) of a map with its padding, in tokens. */
function paddedSize(stage, block) {
  return stage.size.map((side, axis) => Math.ceil(side / block.window[axis]) * block.window[axis]);
}

/** Unpack the data of a block; packing.py documents its layout. */
async function unpackBlock(text, ranks, stage, block) {
  const compressed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('deflate'));
  const bytes = await new Response(stream).arrayBuffer();
  const count = ranks.reduce((sum, rank) => sum + rank, 0);
  const offsets = (2 * block.window[0] - 1) * (2 * block.window[1] - 1);
  const floats = new Float32Array(bytes, 0, 2 * count + stage.heads * offsets);
  const isSmooth = new Uint8Array(bytes, floats.byteLength, 2 * count);
  const planes = new Int8Array(bytes, floats.byteLength + 2 * count);
  const [height, width] = stage.size;
  isSmooth.forEach((flag, plane) => flag && addUp(planes, plane * height * width, height, width));
  return {
    ranks,
    factors: floats.subarray(0, count),
    padFactors: floats.subarray(count, 2 * count),
    bias: floats.subarray(2 * count),
    queries: planes.subarray(0, count * height * width),
    keys: planes.subarray(count * height * width),
  };
}

/** Decode a plane of differences, each from the number to its left or, in the first column, from the number above. */
function addUp(planes, start, height, width) {
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const at = start + y * width + x;
      if (x > 0) planes[at] += planes[at - 1];
      else if (y > 0) planes[at] += planes[at - width];
    }
  }
}

/** Return the attention of a token: per head, for every slot of its window, both terms of the score and the weight.
 *
 * Each term is relative to its mean over the visible slots, because softmax depends only on differences.
 */
function attentionOf(stage, block, numbers, row, column) {
  const { slots, query } = windowOf(stage, block, row, column);
  const isSeen = slots.map((slot) => slot.region === slots[query].region);
  const heads = [];
  let first = 0;
  for (let head = 0; head < stage.heads; head++) {
    const content = contentScores(stage, numbers, slots, query, first, numbers.ranks[head]);
    const position = positionScores(block, numbers, slots.length, query, head);
    const scores = content.map((score, slot) => score + position[slot] - (isSeen[slot] ? 0 : 100));
    heads.push({
      content: centred(content, isSeen),
      position: centred(position, isSeen),
      weights: softmax(scores),
    });
    first += numbers.ranks[head];
  }
  return { slots, query, isSeen, heads, mean: meanOf(heads) };
}

function contentScores(stage, numbers, slots, query, first, rank) {
  const [height, width] = stage.size;
  const area = height * width;
  const from = slots[query].row * width + slots[query].column;
  return slots.map((slot) => {
    const to = slot.row * width + slot.column;
    let score = 0;
    for (let part = first; part < first + rank; part++) {
      const q = numbers.queries[part * area + from];
      score += slot.isPadding ? numbers.padFactors[part] * q : numbers.factors[part] * q * numbers.keys[part * area + to];
    }
    return score;
  });
}

function positionScores(block, numbers, tokens, query, head) {
  const [height, width] = block.window;
  const [queryRow, queryColumn] = [Math.floor(query / width), query % width];
  const start = head * (2 * height - 1) * (2 * width - 1);
  return Array.from({ length: tokens }, (_, slot) => {
    const down = queryRow - Math.floor(slot / width) + height - 1;
    const right = queryColumn - (slot % width) + width - 1;
    return numbers.bias[start + down * (2 * width - 1) + right];
  });
}

function softmax(scores) {
  const largest = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - largest));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

function centred(values, isSeen) {
  const seen = values.filter((_, slot) => isSeen[slot]);
  const mean = seen.reduce((sum, value) => sum + value, 0) / seen.length;
  return values.map((value) => value - mean);
}

function meanOf(heads) {
  const mean = (name) =>
    heads[0][name].map((_, slot) => heads.reduce((sum, head) => sum + head[name][slot], 0) / heads.length);
  return { content: mean('content'), position: mean('position'), weights: mean('weights') };
}

/** Return the standard deviation of centred values over the visible slots. */
function spreadOf(values, isSeen) {
  const seen = values.filter((_, slot) => isSeen[slot]);
  return Math.sqrt(seen.reduce((sum, value) => sum + value * value, 0) / seen.length);
}
