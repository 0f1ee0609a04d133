// The state of the page, its controls, and the rendering of all views.

const facts = JSON.parse(document.getElementById('facts').textContent);
const element = (id) => document.getElementById(id);
const make = (...tags) => tags.map((tag) => document.createElement(tag));
const photo = new Image();
const levelPictures = facts.levels.map(() => new Image());
const calm = matchMedia('(prefers-reduced-motion: reduce)');
const VIEWS = ['windows', 'attention', 'reach'];
const NEARLY_UNIFORM = 1.5; // the largest weight, relative to equal weights, below which no term decides

const state = {
  lang: facts.lang,
  view: 'windows',
  stage: Math.min(1, facts.stages.length - 1),
  block: 0,
  // Start at the upper edge, where the shift splits windows.
  pixel: [0, Math.floor(facts.size[1] / 2)],
  isHeld: false,
  head: 'mean',
  roll: 0,
  cost: 0,
  costSize: facts.costs[0].start,
};

// -- words ------------------------------------------------------------------------------------------------------------

function say(key, values = {}) {
  return facts.labels[state.lang][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const decimal = (number) => new Intl.NumberFormat(state.lang, { minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(number);

const short = (number) =>
  new Intl.NumberFormat(state.lang, { notation: 'compact', compactDisplay: 'long', maximumSignificantDigits: 3 }).format(number);

function percent(share) {
  const digits = share > 0 && share < 0.1 ? 1 : 0;
  return new Intl.NumberFormat(state.lang, { style: 'percent', maximumFractionDigits: digits }).format(share);
}

function sayAll() {
  document.documentElement.lang = state.lang;
  for (const node of document.querySelectorAll('[data-label]')) node.textContent = say(node.dataset.label);
  element('title').textContent = facts.name;
  element('language').textContent = say('language');
  element('language').lang = state.lang === 'en' ? 'zh' : 'en';
  element('photo').setAttribute('aria-label', say('photoLabel'));
  element('heads').setAttribute('aria-label', say('heads'));
  const [height, width] = facts.size;
  const window = sides(facts.stages[0].blocks[0].window);
  element('summary').textContent = say('summary', { model: facts.model, window, height, width });
  element('exact').textContent = say('exact', { off: decimal(100 * facts.off), usually: decimal(100 * facts.usuallyOff) });
  fillChoices();
  fillLegend();
  fillPresets();
}

const precise = (share) =>
  new Intl.NumberFormat(state.lang, { style: 'percent', maximumSignificantDigits: 2 }).format(share);

const sides = ([height, width]) => `${height} × ${width}`;

// -- state ------------------------------------------------------------------------------------------------------------

const stageNow = () => facts.stages[state.stage];
const blockNow = () => stageNow().blocks[state.block];
const isShifted = (block) => block.shift.some((side) => side > 0);

/** Return (row, column) of the token of a stage at the chosen pixel. */
const tokenAt = (stage) => state.pixel.map((at) => Math.floor(at / stage.stride));

const unpacked = new Map();

/** Return the numbers of the chosen block, or null while they are being unpacked; the page is then redrawn. */
function numbersNow() {
  const index = facts.stages.slice(0, state.stage).reduce((sum, stage) => sum + stage.blocks.length, 0) + state.block;
  if (!unpacked.has(index)) {
    unpacked.set(index, null);
    unpackStored(index, stageNow(), blockNow()).then((numbers) => {
      unpacked.set(index, numbers);
      show();
    }, fail);
  }
  return unpacked.get(index);
}

function unpackStored(index, stage, block) {
  const node = document.querySelectorAll('script.block')[index];
  const ranks = node.dataset.ranks.split(' ').map(Number);
  return unpackBlock(node.textContent, ranks, stage, block);
}

function fail(error) {
  element('failure').hidden = false;
  element('failure').textContent = 'DecompressionStream' in globalThis ? String(error) : say('tooOld');
}

// -- showing ----------------------------------------------------------------------------------------------------------

let isDue = false;

/** Redraw everything, at most once per frame. */
function show() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    showNow();
  });
}

function showNow() {
  const stage = stageNow();
  const [row, column] = tokenAt(stage);
  const [y, x] = state.pixel;
  const [rows, columns] = stage.size;
  element('where').textContent = say('where', { y, x, row, column, rows, columns, stride: stage.stride });
  element('pin').hidden = !state.isHeld;
  element('theme').textContent = say(isDark() ? 'light' : 'dark');
  for (const panel of document.querySelectorAll('.panel')) panel.hidden = panel.dataset.view !== state.view;
  ({ windows: showWindows, attention: showAttention, reach: showReach })[state.view]();
  showPyramid();
}

function showWindows() {
  const [stage, block] = [stageNow(), blockNow()];
  const token = tokenAt(stage);
  drawWindows(element('photo'), photo, facts.size, stage, block, token, state.roll);
  const { slots, query, index } = windowOf(stage, block, ...token);
  drawMask(element('mask'), slots, query);

  const count = new Set(slots.map((slot) => slot.region)).size;
  const pairs = slots.reduce((sum, from) => sum + slots.filter((to) => to.region === from.region).length, 0);
  const share = percent(pairs / slots.length ** 2);
  const regions = count === 1 ? say('oneRegion') : say('moreRegions', { count });
  element('mask-note').textContent = say('maskNote', { row: index[0], column: index[1], regions, share });
  element('mask').setAttribute('aria-label', say('maskLabel', { tokens: slots.length, regions: count, share }));

  const [down, right] = block.shift;
  element('shift-note').textContent = isShifted(block) ? say('shiftNote', { down, right }) : say('noShift');
  element('play').textContent = say(state.roll < 0.5 ? 'play' : 'back');
  element('play').disabled = element('roll').disabled = !isShifted(block);
  element('roll').value = Math.round(100 * state.roll);
}

function showAttention() {
  const [stage, block, numbers] = [stageNow(), blockNow(), numbersNow()];
  const token = tokenAt(stage);
  if (!numbers) {
    drawAttention(element('photo'), photo, facts.size, stage, block, token);
    return;
  }
  const looks = attentionOf(stage, block, numbers, ...token);
  const chosen = state.head === 'mean' ? looks.mean : looks.heads[state.head];
  drawAttention(element('photo'), photo, facts.size, stage, block, token, looks, chosen.weights);
  drawCrop(element('crop'), photo, stage, block, looks);

  const terms = [...chosen.content, ...chosen.position].filter((_, at) => looks.isSeen[at % looks.slots.length]);
  const largest = Math.max(...terms.map(Math.abs), 1e-9);
  drawCells(element('content'), block, looks, chosen.content, (value) => signedColour(value / largest));
  drawCells(element('position'), block, looks, chosen.position, (value) => signedColour(value / largest));
  const most = Math.max(...chosen.weights);
  drawCells(element('weights'), block, looks, chosen.weights, (value) => heatColour(value / most));
  drawScale(element('scale'), (share) => signedColour(2 * share - 1));
  element('scale-low').textContent = say('scaleLow', { value: decimal(largest) });
  element('scale-high').textContent = say('scaleHigh', { value: decimal(largest) });
  drawScale(element('heat'), heatColour);
  element('heat-low').textContent = say('heatLow');
  element('heat-high').textContent = say('heatHigh', { value: precise(most) });
  sayAttention(stage, looks, chosen);
  showHeads(stage, block, looks);
}

function sayAttention(stage, looks, chosen) {
  const spreads = { content: spreadOf(chosen.content, looks.isSeen), position: spreadOf(chosen.position, looks.isSeen) };
  const larger = Math.max(spreads.content, spreads.position, 1e-9);
  fillBars(element('spreads'), Object.entries(spreads).map(([name, value]) => ({
    name, label: say(name), share: value / larger, number: say('spread', { value: decimal(value) }),
  })));
  const ratio = spreads.content / Math.max(spreads.position, 1e-9);
  const winner = ratio > 1.25 ? 'verdictContent' : ratio < 0.8 ? 'verdictPosition' : 'verdictEven';
  const strongest = chosen.weights.indexOf(Math.max(...chosen.weights));
  const equal = 1 / looks.isSeen.filter(Boolean).length;
  const isUniform = chosen.weights[strongest] < NEARLY_UNIFORM * equal;
  const weights = { largest: precise(chosen.weights[strongest]), equal: precise(equal) };
  element('verdict').textContent = say(isUniform ? 'verdictUniform' : winner, weights);

  const { row, column, isPadding } = looks.slots[strongest];
  const share = percent(chosen.weights[strongest]);
  const onPadding = chosen.weights.reduce((sum, weight, at) => sum + (looks.slots[at].isPadding ? weight : 0), 0);
  const padding = onPadding > 0.0005 ? say('onPadding', { share: percent(onPadding) }) : '';
  element('head-note').textContent = say(isPadding ? 'mostOnPadding' : 'headNote', { share, row, column, padding });

  const head = state.head === 'mean' ? say('meanOfHeads', { count: stage.heads }) : say('head', { number: state.head });
  element('weights').setAttribute('aria-label', say('attentionLabel', { head, row, column, share }));
  element('content').setAttribute('aria-label', say('contentLabel', { head, value: decimal(spreads.content) }));
  element('position').setAttribute('aria-label', say('positionLabel', { head, value: decimal(spreads.position) }));
  element('crop').setAttribute('aria-label', say('cropLabel'));
}

function showHeads(stage, block, looks) {
  const canvases = element('heads').querySelectorAll('canvas');
  [looks.mean, ...looks.heads].forEach(({ weights }, at) => {
    const most = Math.max(...weights);
    drawCells(canvases[at], block, looks, weights, (value) => heatColour(value / most));
  });
}

/** Return the receptive field of the token after a block, (top, bottom, left, right) in pixels. */
function reachAfter(stage, block) {
  const [row, column] = tokenAt(stage);
  return [...block.rows[row], ...block.columns[column]];
}

function showReach() {
  const [height, width] = facts.size;
  const buttons = [...element('steps').querySelectorAll('button')];
  const boxes = [];
  let at = 0;
  facts.stages.forEach((stage, stageIndex) => stage.blocks.forEach((block, blockIndex) => {
    const box = reachAfter(stage, block);
    const [top, bottom, left, right] = box;
    const button = buttons[at++];
    button.querySelector('.fill').style.width = `${(100 * (bottom - top) * (right - left)) / (height * width)}%`;
    button.querySelector('.number').textContent = `${bottom - top} × ${right - left}`;
    button.setAttribute('aria-pressed', stageIndex === state.stage && blockIndex === state.block);
    if (stageIndex < state.stage || (stageIndex === state.stage && blockIndex <= state.block)) boxes.push(box);
  }));
  const stage = stageNow();
  const [row, column] = tokenAt(stage);
  const token = [column * stage.stride, row * stage.stride, stage.stride, stage.stride];
  drawReach(element('photo'), photo, facts.size, boxes, token);
}

function showPyramid() {
  facts.levels.forEach(({ stride }, at) => {
    const figure = element('levels').children[at];
    const [rows, columns] = [levelPictures[at].naturalHeight, levelPictures[at].naturalWidth];
    const [row, column] = state.pixel.map((position) => Math.floor(position / stride));
    const canvas = figure.querySelector('canvas');
    drawLevel(canvas, levelPictures[at], facts.size, stride, state.pixel);
    canvas.setAttribute('aria-label', say('levelLabel', { stride, rows, columns, row, column }));
    figure.querySelector('figcaption').textContent = say('levelCaption', { stride, rows, columns });
  });
}

function showCost() {
  const series = facts.costs[state.cost];
  const [height, width, global, windowed] = series.sizes[state.costSize];
  element('size').max = series.sizes.length - 1;
  element('size').value = state.costSize;
  const isOwn = series.name !== 'paper' && state.costSize === series.start;
  element('size-label').textContent = say(isOwn ? 'sizeOwn' : 'sizeLabel', { height, width });
  const window = sides(series.window);
  fillBars(element('costs'), [
    { name: 'global', label: say('global'), share: 1, number: short(global) },
    { name: 'windows', label: say('windowed', { window }), share: windowed / global, number: short(windowed) },
  ]);
  const values = { saved: short(global - windowed), share: percent(windowed / global) };
  element('saved').textContent = say(global > windowed ? 'saved' : 'savedNone', values);
}

function fillBars(list, bars) {
  list.replaceChildren(...bars.map(({ name, label, share, number }) => {
    const [group, term, bar, value, track, fill] = make('div', 'dt', 'dd', 'dd', 'div', 'div');
    term.textContent = label;
    track.className = 'track';
    fill.className = `fill ${name}`;
    fill.style.width = `${100 * share}%`;
    track.append(fill);
    bar.append(track);
    value.className = 'number';
    value.textContent = number;
    group.append(term, bar, value);
    return group;
  }));
}

// -- controls ---------------------------------------------------------------------------------------------------------

function fillChoices() {
  offer('views', VIEWS, state.view, say, (view) => {
    state.view = view;
    show();
  });
  offer('stages', facts.stages.keys(), state.stage, (stage) => stage, (stage) => choose(stage, state.block));
  offerBlocks();
  offerHeads();
  fillSteps();
}

function offerBlocks() {
  const { blocks } = stageNow();
  const name = (block) => (isShifted(blocks[block]) ? `${block} · ${say('shifted')}` : block);
  offer('blocks', blocks.keys(), state.block, name, (block) => choose(state.stage, block));
}

function choose(stage, block) {
  const isOther = stage !== state.stage;
  state.stage = stage;
  state.block = Math.min(block, stageNow().blocks.length - 1);
  if (state.head !== 'mean' && state.head >= stageNow().heads) state.head = 'mean';
  if (!isShifted(blockNow())) state.roll = 0;
  if (isOther) {
    check('stages', stage);
    offerBlocks();
    offerHeads();
  }
  check('blocks', state.block);
  show();
}

function check(id, value) {
  element(id).querySelector(`input[value="${value}"]`).checked = true;
}

/** Fill an element with radio buttons. */
function offer(id, values, chosen, name, onChoice) {
  const parent = element(id);
  for (const old of parent.querySelectorAll('.choice')) old.remove();
  for (const value of values) {
    const [label, input, text] = make('label', 'input', 'span');
    label.className = 'choice';
    Object.assign(input, { type: 'radio', name: id, value, checked: value === chosen });
    input.addEventListener('change', () => onChoice(value));
    text.textContent = name(value);
    label.append(input, text);
    parent.append(label);
  }
}

function offerHeads() {
  const heads = ['mean', ...Array(stageNow().heads).keys()];
  offer('heads', heads, state.head, (head) => (head === 'mean' ? say('mean') : head), (head) => {
    state.head = head;
    show();
  });
  for (const label of element('heads').children) {
    const canvas = document.createElement('canvas');
    canvas.className = 'square';
    label.prepend(canvas);
    const { value } = label.querySelector('input');
    if (value !== 'mean') label.querySelector('input').setAttribute('aria-label', say('head', { number: value }));
  }
}

function fillSteps() {
  element('steps').replaceChildren(...facts.stages.flatMap((stage, stageIndex) => stage.blocks.map((_, blockIndex) => {
    const [item, button, name, track, fill, number] = make('li', 'button', 'span', 'div', 'div', 'span');
    button.type = 'button';
    button.addEventListener('click', () => choose(stageIndex, blockIndex));
    name.textContent = say('step', { stage: stageIndex, block: blockIndex });
    track.className = 'track';
    fill.className = 'fill';
    number.className = 'number';
    track.append(fill);
    button.append(name, track, number);
    item.append(button);
    return item;
  })));
}

function fillLegend() {
  const entries = [...[1, 3, 4].map((region) => [REGION_COLOURS[region], false]), ['transparent', true]];
  const items = [];
  entries.forEach(([colour, isHatched], at) => {
    const [canvas, text] = make('canvas', 'span');
    text.textContent = at === 2 ? say('legendRegions') : isHatched ? say('legendPadding') : '';
    const item = at === 0 || isHatched ? document.createElement('li') : items.at(-1);
    item.append(canvas, text);
    if (item !== items.at(-1)) items.push(item);
    requestAnimationFrame(() => drawSwatch(canvas, colour, isHatched));
  });
  const edge = document.createElement('li');
  edge.textContent = say('legendEdge');
  element('legend').replaceChildren(...items, edge);
}

function fillPresets() {
  element('preset').replaceChildren(...facts.costs.map(({ name, channels }, at) => {
    const text = name === 'paper' ? say('presetPaper') : say('presetStage', { stage: name, channels });
    return new Option(text, at, false, at === state.cost);
  }));
  showCost();
}

/** Choose the pixel at a position of the map of the chosen stage, clipped to the photograph. */
function moveTo(y, x) {
  state.pixel = [y, x].map((at, axis) => Math.min(Math.max(Math.floor(at), 0), facts.size[axis] - 1));
  show();
}

/** Return the position of a pointer on a canvas, in pixels of the photograph. */
function placeOn(canvas, event, [height, width]) {
  const box = canvas.getBoundingClientRect();
  return [((event.clientY - box.top) / box.height) * height, ((event.clientX - box.left) / box.width) * width];
}

function followPointer(canvas, placeOf) {
  const follow = (event) => moveTo(...placeOf(event));
  canvas.addEventListener('pointermove', (event) => {
    if (!state.isHeld && event.pointerType === 'mouse') follow(event);
  });
  canvas.addEventListener('click', (event) => {
    // Touch has no hover that would move the token, so a tap need not fix it.
    state.isHeld = event.pointerType !== 'touch' && !state.isHeld;
    follow(event);
  });
}

/** Return the pixel under a pointer on the photograph, which may be padded and rolled. */
function placeOnPhoto(event) {
  if (state.view !== 'windows') return placeOn(element('photo'), event, facts.size);
  const [stage, block] = [stageNow(), blockNow()];
  const padded = paddedSize(stage, block).map((side) => side * stage.stride);
  const place = placeOn(element('photo'), event, padded);
  return place.map((at, axis) => (at + block.shift[axis] * stage.stride * state.roll) % padded[axis]);
}

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function followKeys(event) {
  const arrow = ARROWS[event.key];
  if (!arrow || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const stage = stageNow();
  const steps = event.shiftKey ? blockNow().window : [1, 1];
  const token = tokenAt(stage).map((at, axis) => {
    const moved = at + arrow[axis] * steps[axis];
    return Math.min(Math.max(moved, 0), stage.size[axis] - 1);
  });
  moveTo(...token.map((at) => (at + 0.5) * stage.stride));
  announce();
}

let announcement;

/** Announce the token and its view to screen readers, once no key has been pressed for a moment. */
function announce() {
  clearTimeout(announcement);
  announcement = setTimeout(() => {
    const [row, column] = tokenAt(stageNow());
    const [top, bottom, left, right] = reachAfter(stageNow(), blockNow());
    const details = {
      windows: () => element('mask-note').textContent,
      attention: () => element('head-note').textContent,
      reach: () => say('liveReach', { height: bottom - top, width: right - left }),
    };
    element('live').textContent = `${say('live', { row, column })} ${details[state.view]()}`;
  }, 250);
}

let rolling;

/** Roll the map forward or back, in one second, or at once if the user prefers reduced motion. */
function roll() {
  cancelAnimationFrame(rolling);
  const [from, to] = [state.roll, state.roll < 0.5 ? 1 : 0];
  const start = performance.now();
  const step = (now) => {
    const time = calm.matches ? 1 : Math.min(Math.max((now - start) / 1200, 0), 1);
    state.roll = from + (to - from) * (time < 0.5 ? 2 * time * time : 1 - 2 * (1 - time) ** 2);
    show();
    if (time < 1) rolling = requestAnimationFrame(step);
  };
  rolling = requestAnimationFrame(step);
}

/** Let the token follow the pointer again. */
function release() {
  state.isHeld = false;
  show();
}

function listen() {
  element('pin').addEventListener('click', release);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && state.isHeld) release();
  });
  followPointer(element('photo'), placeOnPhoto);
  element('photo').addEventListener('keydown', followKeys);
  element('play').addEventListener('click', roll);
  element('roll').addEventListener('input', (event) => {
    cancelAnimationFrame(rolling);
    state.roll = event.target.value / 100;
    show();
  });
  element('language').addEventListener('click', () => {
    state.lang = state.lang === 'en' ? 'zh' : 'en';
    sayAll();
    show();
  });
  element('theme').addEventListener('click', () => {
    document.documentElement.style.colorScheme = isDark() ? 'light' : 'dark';
    sayAll();
    show();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', show);
  element('preset').addEventListener('change', (event) => {
    state.cost = Number(event.target.value);
    state.costSize = facts.costs[state.cost].start;
    showCost();
  });
  element('size').addEventListener('input', (event) => {
    state.costSize = Number(event.target.value);
    showCost();
  });
  new ResizeObserver(show).observe(document.body);
}

function addLevels() {
  facts.levels.forEach(() => {
    const [figure, canvas, caption] = make('figure', 'canvas', 'figcaption');
    canvas.setAttribute('role', 'img');
    followPointer(canvas, (event) => placeOn(canvas, event, facts.size));
    figure.append(canvas, caption);
    element('levels').append(figure);
  });
}

// For the browser's console: the attention of a token; all indices count from 0.
globalThis.swinExplorer = {
  attention: async (stage, block, row, column) => {
    const before = facts.stages.slice(0, stage).reduce((sum, { blocks }) => sum + blocks.length, 0);
    const [its, own] = [facts.stages[stage], facts.stages[stage].blocks[block]];
    return attentionOf(its, own, await unpackStored(before + block, its, own), row, column);
  },
};

element('random').hidden = !facts.isRandom;
state.block = stageNow().blocks.findIndex(isShifted);
if (state.block < 0) state.block = 0;
addLevels();
sayAll();
listen();
photo.src = facts.photo;
levelPictures.forEach((picture, at) => {
  picture.src = facts.levels[at].picture;
});
try {
  await Promise.all([photo, ...levelPictures].map((picture) => picture.decode()));
  show();
} catch (error) {
  fail(error);
}
