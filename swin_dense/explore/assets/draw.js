// Drawing on a canvas: colours, hatching, windows, cells.

const REGION_COLOURS = ['', '#2a9d8f', '#e9c46a', '#e76f51', '#8e7dbe', '#4a90d9', '#f4a1b5', '#7fb069', '#c2572b'];
// A colour means the same number in the light and in the dark scheme.
const HEAT = ['#faf6ef', '#fbd79b', '#f08b3e', '#c23b22', '#5a1230'];
const TWO_SIDED = ['#1d5f8a', '#8fbcd6', '#f3f1ec', '#eda883', '#a8371b']; // below and above the mean
const TOKEN_COLOUR = '#00e5ff';

function isDark() {
  const scheme = document.documentElement.style.colorScheme;
  return scheme ? scheme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

/** Interpolate a list of colours at a position from 0 to 1. */
function ramp(colours, share) {
  const at = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
  const [low, high] = [colours[Math.floor(at)], colours[Math.ceil(at)]];
  const channel = (colour, index) => parseInt(colour.slice(1 + 2 * index, 3 + 2 * index), 16);
  const mixed = [0, 1, 2].map((index) => {
    const [from, to] = [channel(low, index), channel(high, index)];
    return Math.round(from + (to - from) * (at - Math.floor(at)));
  });
  return `rgb(${mixed.join(' ')})`;
}

const heatColour = (share) => ramp(HEAT, share);
const signedColour = (share) => ramp(TWO_SIDED, (share + 1) / 2);

/** Match a canvas's resolution to the screen, and return a drawing context in units of (height, width). */
function prepare(canvas, [height, width]) {
  canvas.style.aspectRatio = `${width} / ${height}`;
  canvas.style.setProperty('--ratio', width / height);
  const shown = Math.max(canvas.clientWidth, 1);
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const scale = (shown * ratio) / width;
  const pixels = [Math.max(Math.round(width * scale), 1), Math.max(Math.round(height * scale), 1)];
  if (canvas.width !== pixels[0]) canvas.width = pixels[0];
  if (canvas.height !== pixels[1]) canvas.height = pixels[1];
  const draw = canvas.getContext('2d');
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  draw.thin = ratio / scale; // one CSS pixel
  return draw;
}

/** Hatch a rectangle, which marks padding. */
function hatch(draw, left, top, width, height, colour) {
  if (width <= 0 || height <= 0) return;
  draw.save();
  draw.beginPath();
  draw.rect(left, top, width, height);
  draw.clip();
  draw.strokeStyle = colour;
  draw.lineWidth = draw.thin;
  draw.beginPath();
  const step = 7 * draw.thin;
  // All rectangles share one origin, so that lines continue across neighbouring rectangles.
  for (let at = Math.floor((left + top) / step) * step; at < left + width + top + height; at += step) {
    draw.moveTo(at - top, top);
    draw.lineTo(at - top - height, top + height);
  }
  draw.stroke();
  draw.restore();
}

function outline(draw, left, top, width, height, colour, thickness) {
  draw.strokeStyle = 'rgb(0 0 0 / 0.65)';
  draw.lineWidth = (thickness + 2) * draw.thin;
  draw.strokeRect(left, top, width, height);
  draw.strokeStyle = colour;
  draw.lineWidth = thickness * draw.thin;
  draw.strokeRect(left, top, width, height);
}

/** Return, along one axis of the unrolled map, the parts of each region: [from, to, region] in tokens. */
function regionParts(padded, window, shift) {
  if (shift === 0) return [[0, padded, 0]];
  const seam = padded - window + shift;
  return [[0, shift, 2], [shift, seam, 0], [seam, padded, 1]].filter(([from, to]) => from < to);
}

/** Return, along one axis of the unrolled map, the one or two parts of a window: [from, to] in tokens. */
function windowParts(index, padded, window, shift) {
  const from = index * window + shift;
  return from + window <= padded ? [[from, from + window]] : [[from, padded], [0, from + window - padded]];
}

/** Draw the photograph with padding, windows and regions, rolled by a fraction of the block's shift. */
function drawWindows(canvas, photo, size, stage, block, token, share) {
  const { stride } = stage;
  const padded = paddedSize(stage, block);
  const [height, width] = padded.map((side) => side * stride);
  const draw = prepare(canvas, [height, width]);
  const down = -block.shift[0] * stride * share;
  const right = -block.shift[1] * stride * share;
  const transform = draw.getTransform();
  // The roll is cyclic.
  for (const [x, y] of [[0, 0], [width, 0], [0, height], [width, height]]) {
    if (right + x >= width || down + y >= height || right + x <= -width || down + y <= -height) continue;
    draw.setTransform(transform);
    draw.translate(right + x, down + y);
    drawMapAsItLies(draw, photo, size, stage, block, token, padded);
  }
  draw.setTransform(transform);
}

function drawMapAsItLies(draw, photo, size, stage, block, token, padded) {
  const { stride } = stage;
  const [height, width] = padded.map((side) => side * stride);
  draw.fillStyle = isDark() ? '#23252a' : '#efece6';
  draw.fillRect(0, 0, width, height);
  draw.drawImage(photo, 0, 0, size[1], size[0]);
  const rows = regionParts(padded[0], block.window[0], block.shift[0]);
  const columns = regionParts(padded[1], block.window[1], block.shift[1]);
  for (const [top, bottom, rowRegion] of rows) {
    for (const [left, right, columnRegion] of columns) {
      const region = 3 * rowRegion + columnRegion;
      if (!region) continue;
      draw.globalAlpha = 0.5;
      draw.fillStyle = REGION_COLOURS[region];
      draw.fillRect(left * stride, top * stride, (right - left) * stride, (bottom - top) * stride);
      draw.globalAlpha = 1;
    }
  }
  const [tokenRows, tokenColumns] = stage.size.map((side) => side * stride);
  const slanted = isDark() ? 'rgb(255 255 255 / 0.4)' : 'rgb(0 0 0 / 0.4)';
  hatch(draw, tokenColumns, 0, width - tokenColumns, height, slanted);
  hatch(draw, 0, tokenRows, tokenColumns, height - tokenRows, slanted);
  drawGrid(draw, block, padded, stride);

  const { index } = windowOf(stage, block, ...token);
  for (const [top, bottom] of windowParts(index[0], padded[0], block.window[0], block.shift[0])) {
    for (const [left, right] of windowParts(index[1], padded[1], block.window[1], block.shift[1])) {
      outline(draw, left * stride, top * stride, (right - left) * stride, (bottom - top) * stride, '#ffffff', 2);
    }
  }
  outline(draw, token[1] * stride, token[0] * stride, stride, stride, TOKEN_COLOUR, 2);
}

/** Draw the borders of windows, and as dashed lines the edges of the map, which meet when it is rolled. */
function drawGrid(draw, block, padded, stride) {
  const [height, width] = padded.map((side) => side * stride);
  const path = new Path2D();
  for (let y = block.shift[0]; y <= padded[0]; y += block.window[0]) {
    path.moveTo(0, y * stride);
    path.lineTo(width, y * stride);
  }
  for (let x = block.shift[1]; x <= padded[1]; x += block.window[1]) {
    path.moveTo(x * stride, 0);
    path.lineTo(x * stride, height);
  }
  for (const [colour, thickness] of [['rgb(0 0 0 / 0.45)', 2], ['rgb(255 255 255 / 0.85)', 1]]) {
    draw.strokeStyle = colour;
    draw.lineWidth = thickness * draw.thin;
    draw.stroke(path);
  }
  draw.setLineDash([4 * draw.thin, 3 * draw.thin]);
  draw.strokeRect(0, 0, width, height);
  draw.setLineDash([]);
}

/** Draw the attention mask of a window: rows are queries, columns are keys, padding is hatched. */
function drawMask(canvas, slots, query) {
  const tokens = slots.length;
  const draw = prepare(canvas, [tokens, tokens]);
  draw.fillStyle = isDark() ? '#101114' : '#e8e5df';
  draw.fillRect(0, 0, tokens, tokens);
  slots.forEach((from, y) => {
    draw.fillStyle = REGION_COLOURS[from.region] || (isDark() ? '#a9a7a2' : '#77787f');
    // Adjacent pairs are drawn as one rectangle, which avoids seams.
    for (let x = 0, end; x < tokens; x = end) {
      for (end = x + 1; end < tokens && slots[end].region === slots[x].region; end++);
      if (slots[x].region === from.region) draw.fillRect(x, y, end - x, 1 + draw.thin / 2);
    }
  });
  const slanted = isDark() ? 'rgb(255 255 255 / 0.3)' : 'rgb(0 0 0 / 0.3)';
  slots.forEach((slot, at) => {
    if (!slot.isPadding) return;
    hatch(draw, at, 0, 1, tokens, slanted);
    hatch(draw, 0, at, tokens, 1, slanted);
  });
  outline(draw, 0, query, tokens, 1, TOKEN_COLOUR, 1.5);
}

/** Draw the values of a window's slots as cells; masked slots are blank, padding is hatched, the token is framed. */
function drawCells(canvas, block, looks, values, colourOf) {
  const [height, width] = block.window;
  const draw = prepare(canvas, [height, width]);
  const slanted = isDark() ? 'rgb(255 255 255 / 0.5)' : 'rgb(0 0 0 / 0.45)';
  looks.slots.forEach((slot, at) => {
    const [y, x] = [Math.floor(at / width), at % width];
    if (!looks.isSeen[at]) return;
    draw.fillStyle = colourOf(values[at]);
    draw.fillRect(x, y, 1.01, 1.01);
    if (slot.isPadding) hatch(draw, x, y, 1, 1, slanted);
  });
  frameToken(draw, looks.query, width);
}

/** Draw the photograph's pixels in the slots of a window. */
function drawCrop(canvas, photo, stage, block, looks) {
  const [height, width] = block.window;
  const { stride } = stage;
  const draw = prepare(canvas, [height, width]);
  looks.slots.forEach((slot, at) => {
    const [y, x] = [Math.floor(at / width), at % width];
    if (slot.isPadding) {
      hatch(draw, x, y, 1, 1, isDark() ? 'rgb(255 255 255 / 0.5)' : 'rgb(0 0 0 / 0.45)');
      return;
    }
    draw.globalAlpha = looks.isSeen[at] ? 1 : 0.18;
    draw.drawImage(photo, slot.column * stride, slot.row * stride, stride, stride, x, y, 1.01, 1.01);
  });
  draw.globalAlpha = 1;
  frameToken(draw, looks.query, width);
}

function frameToken(draw, query, width) {
  outline(draw, query % width, Math.floor(query / width), 1, 1, TOKEN_COLOUR, 1.5);
}

/** Draw the attention of a token over the photograph. */
function drawAttention(canvas, photo, size, stage, block, token, looks, weights) {
  const { stride } = stage;
  const draw = prepare(canvas, size);
  draw.drawImage(photo, 0, 0, size[1], size[0]);
  draw.fillStyle = isDark() ? 'rgb(10 11 13 / 0.5)' : 'rgb(255 255 255 / 0.45)';
  draw.fillRect(0, 0, size[1], size[0]);
  if (looks) {
    const largest = Math.max(...weights);
    looks.slots.forEach((slot, at) => {
      if (slot.isPadding || !looks.isSeen[at]) return;
      const box = [slot.column * stride, slot.row * stride, stride, stride];
      draw.drawImage(photo, ...box, ...box);
      draw.globalAlpha = 0.8;
      draw.fillStyle = heatColour(weights[at] / largest);
      draw.fillRect(...box);
      draw.globalAlpha = 1;
    });
  }
  const padded = paddedSize(stage, block);
  const { index } = windowOf(stage, block, ...token);
  for (const [top, bottom] of windowParts(index[0], padded[0], block.window[0], block.shift[0])) {
    for (const [left, right] of windowParts(index[1], padded[1], block.window[1], block.shift[1])) {
      outline(draw, left * stride, top * stride, (right - left) * stride, (bottom - top) * stride, '#ffffff', 1.5);
    }
  }
  outline(draw, token[1] * stride, token[0] * stride, stride, stride, TOKEN_COLOUR, 2);
}

/** Draw nested boxes, (top, bottom, left, right) in pixels, over the photograph, and darken it outside the last box. */
function drawReach(canvas, photo, size, boxes, token) {
  const draw = prepare(canvas, size);
  draw.drawImage(photo, 0, 0, size[1], size[0]);
  const [top, bottom, left, right] = boxes.at(-1);
  draw.fillStyle = isDark() ? 'rgb(10 11 13 / 0.72)' : 'rgb(255 255 255 / 0.72)';
  draw.beginPath();
  draw.rect(0, 0, size[1], size[0]);
  draw.rect(left, top, right - left, bottom - top);
  draw.fill('evenodd');
  boxes.forEach(([from, to, start, end], step) => {
    const isLast = step === boxes.length - 1;
    outline(draw, start, from, end - start, to - from, isLast ? '#ff9a5c' : 'rgb(255 200 160 / 0.8)', isLast ? 3 : 1);
  });
  outline(draw, ...token, TOKEN_COLOUR, 2);
}

/** Draw a level of the pyramid and mark the cell of a pixel. */
function drawLevel(canvas, picture, size, stride, pixel) {
  const draw = prepare(canvas, size);
  draw.imageSmoothingEnabled = false;
  draw.drawImage(picture, 0, 0, picture.naturalWidth * stride, picture.naturalHeight * stride);
  const [row, column] = pixel.map((at) => Math.floor(at / stride));
  // The frame has a minimum size, so that small cells are visible.
  const side = Math.max(stride, 9 * draw.thin);
  const [top, left] = [row, column].map((at) => (at + 0.5) * stride - side / 2);
  outline(draw, left, top, side, side, TOKEN_COLOUR, 2);
}

function drawScale(canvas, colourOf) {
  const draw = prepare(canvas, [6, 100]);
  const gradient = draw.createLinearGradient(0, 0, 100, 0);
  for (let step = 0; step <= 8; step++) gradient.addColorStop(step / 8, colourOf(step / 8));
  draw.fillStyle = gradient;
  draw.fillRect(0, 0, 100, 6);
}

function drawSwatch(canvas, colour, isHatched) {
  const draw = prepare(canvas, [16, 21]);
  draw.fillStyle = colour;
  draw.fillRect(0, 0, 21, 16);
  if (isHatched) hatch(draw, 0, 0, 21, 16, isDark() ? 'rgb(255 255 255 / 0.6)' : 'rgb(0 0 0 / 0.55)');
}
