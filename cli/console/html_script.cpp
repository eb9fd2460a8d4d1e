// The script of a page (html_page.h): three kinds of charts, then the pictures of each verb.
#include "cli/console/html_page.h"

namespace nvfp4_moe::internal::cli {

constexpr std::string_view kPageScript = R"js(
'use strict';
const report = JSON.parse(document.getElementById('report').textContent);
const pictures = document.getElementById('pictures');
const SVG = 'http://www.w3.org/2000/svg';
let width = 0;

function add(parent, name, attributes = {}, text) {
  const svg = name === 'svg' || parent.namespaceURI === SVG;
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text) node.textContent = text;
  return parent.appendChild(node);
}
const label = (svg, x, y, anchor, text, kind = 'soft') =>
    add(svg, 'text', {x, y, 'text-anchor': anchor, class: kind}, text);
const tooltip = (node, text) => text && add(node, 'title', {}, text);

const sum = (rows, key) => rows.reduce((all, row) => all + row[key], 0);
const unique = values => [...new Set(values)];
const ascending = values => unique(values).sort((a, b) => a - b);
const upTo = count => [...Array(count).keys()];
const plural = (count, word) => `${count} ${word}${count === 1 ? '' : 's'}`;
const percent = v => (100 * v).toFixed(v > 0 && v < 0.0995 ? 1 : 0) + ' %';
const number = v => typeof v === 'number' ? v : Infinity;  // JSON has no others
function short(v) {
  if (v === 0 || !isFinite(v)) return v === 0 ? '0' : 'not finite';
  return v >= 1e-3 && v < 1e6 ? String(+v.toPrecision(3)) : v.toExponential(1).replace('.0', '');
}
function bytes(v) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; v >= 1024 && i < 4; ++i) v /= 1024;
  return v.toFixed(i ? 1 : 0) + ' ' + units[i];
}

// A frame with a title, a sentence and what the colours mean: [class, name] each. Returns a
// function that adds the drawing.
function figure(id, title, note, colours = []) {
  const frame = add(pictures, 'figure', {id});
  add(frame, 'h2', {}, title);
  add(frame, 'p', {class: 'note'}, note);
  const legend = add(frame, 'div', {class: 'legend'});
  for (const [kind, name] of colours) {
    const one = add(legend, 'span');
    add(one, 'i', {class: kind});
    one.append(name);
  }
  return (wide, high) =>
      add(frame, 'svg', {width: wide, height: high, role: 'img', 'aria-label': title});
}

// Horizontal bars, of rows {label, text, parts: [{value, kind, tip}]}. most: the end of the track.
function bars(canvas, rows, most) {
  const space = key => 16 + 6.6 * Math.max(...rows.map(row => row[key].length));
  const left = space('label'), room = width - left - space('text');
  const svg = canvas(width, rows.length * 26 + 4);
  most ||= Math.max(...rows.map(row => sum(row.parts, 'value')));
  rows.forEach((row, i) => {
    const y = i * 26 + 4;
    let x = left;
    label(svg, left - 8, y + 14, 'end', row.label, '');
    add(svg, 'rect', {class: 'track', x, y, width: room, height: 20});
    for (const part of row.parts) {
      const long = most > 0 ? Math.min(room * part.value / most, left + room - x) : 0;
      const bar = {class: 'bar ' + part.kind, x, y, width: Math.max(0, long), height: 20};
      tooltip(add(svg, 'rect', bar), part.tip);
      x += long;
    }
    label(svg, left + room + 8, y + 14, 'start', row.text);
  });
}

// A heat map. at(row, column): {kind, share: 0 to 1, how strong the colour is, tip, text, ring}.
function heat(canvas, rows, columns, at) {
  const left = 24 + 6.6 * Math.max(...rows.map(row => row.length));
  const high = rows.length > 24 ? 12 : 22;
  const wide = Math.max(4, Math.min(64, (width - left) / columns.length)), gap = wide > 8 ? 1 : 0.5;
  const svg = canvas(Math.max(width, left + wide * columns.length), rows.length * high + 22);
  const every = [1, 2, 4, 8, 16].find(count => count * wide >= 34) || 16;
  columns.forEach((name, c) => {
    if (name === 'all') label(svg, left + wide - 3, 12, 'end', name);
    else if (name % every === 0) label(svg, left + wide * (c + 0.5), 12, 'middle', String(name));
  });
  rows.forEach((name, r) => {
    const y = 20 + r * high;
    label(svg, left - 8, y + high / 2 + 4, 'end', name, '');
    columns.forEach((_, c) => {
      const {kind, share = 1, tip, text, ring} = at(r, c);
      const area = {x: left + c * wide, y, width: wide - gap, height: high - gap};
      if (share < 1) add(svg, 'rect', {class: 'track', ...area});
      const cell = add(svg, 'rect', {class: 'cell ' + kind, ...area, 'fill-opacity': share});
      tooltip(cell, tip);
      if (ring) add(svg, 'rect', {class: 'ring', ...area});
      if (text && wide >= 40)
        label(svg, area.x + wide / 2, y + high / 2 + 4, 'middle', text, 'over');
    });
  });
}

// Curves over a logarithmic axis; what is 0 is on the axis, what is not finite at the top. series:
// {kind, curve: 'solid' or 'dash' (without dots), points: [{x, y, tip}]}. xs: the columns.
function plot(canvas, series, xs, title) {
  const left = 70, top = 12, high = 260, room = width - left - 20;
  const svg = canvas(width, top + high + 44);
  const ys = series.flatMap(s => s.points).map(p => p.y), zero = ys.some(y => !(y > 0));
  const logs = ys.filter(y => y > 0 && isFinite(y)).map(Math.log10);
  const low = logs.length ? Math.floor(Math.min(...logs) - 0.05) - zero : -1;
  const end = logs.length ? Math.ceil(Math.max(...logs) + 0.05) : 0;
  const xOf = x => left + room * (xs.indexOf(x) + 0.5) / xs.length;
  const yOf = v => top + high * Math.max(0, v > 0 ? (end - Math.log10(v)) / (end - low) : 1);
  for (let e = low; e <= end; e += Math.ceil((end - low) / 8)) {
    const axis = zero && e === low;
    for (const digit of end - low < 4 && e < end && !axis ? [1, 2, 5] : [1]) {
      const y = yOf(digit * 10 ** e);
      add(svg, 'line', {class: 'grid', x1: left, x2: left + room, y1: y, y2: y});
      label(svg, left - 8, y + 4, 'end', axis ? '0' : short(digit * 10 ** e));
    }
  }
  const every = Math.ceil(40 * xs.length / room);
  xs.forEach((x, i) => {
    if (i % every === 0) label(svg, xOf(x), top + high + 18, 'middle', String(x));
  });
  label(svg, left + room / 2, top + high + 38, 'middle', title);
  for (const {kind, curve, points} of series) {
    const ends = points.flatMap(p => (xs.length > 1 ? [0] : [-30, 30])
        .map(by => `${xOf(p.x) + by},${yOf(p.y)}`));
    add(svg, 'polyline', {class: `path ${curve} ${kind}`, points: ends.join(' ')});
    for (const p of curve === 'dash' ? [] : points) {
      const dot = {class: 'dot ' + kind, cx: xOf(p.x), cy: yOf(p.y), r: 4};
      tooltip(add(svg, 'circle', dot), p.tip);
    }
  }
}

function inspect() {
  const read = report.layer_statistics || [], fit = report.fit || [], all = report.size_bytes;
  const parts = [];
  if (read.length) parts.push(['codes', sum(read, 'codes_bytes')],
                              ['block scales', sum(read, 'scales_bytes')]);
  if (fit.length) parts.push(['not routed experts', fit[0].other_bytes]);
  const rest = fit.length ? read.length ? 'rest of the experts' : 'routed experts' : 'other';
  parts.push([rest, all - sum(parts, 1)]);
  bars(figure('parts', 'Bytes by part', bytes(all) + ' in all' + (read.length ?
              '; codes and block scales of the layers that were read.' : '.')),
       parts.map(([name, value], i) => ({
         label: name, text: bytes(value) + ', ' + percent(value / all),
         parts: [{value, kind: 's' + i, tip: value + ' bytes'}]})), all);

  const found = report.findings.filter(f => f.layer !== null), at = {};
  for (const f of found) (at[[f.layer, f.expert ?? 'all']] ||= []).push(f);
  const layers = ascending([...read, ...found].map(one => one.layer)
      .concat(report.activations.flatMap(one => one.layers)));
  const columns = ['all', ...upTo(report.num_experts)];
  const kinds = {error: 'error', warning: 'warn', note: 's0'};
  heat(figure('experts', 'Findings by layer and expert',
              'Column "all" has findings of a whole layer; one that stands for several is at the ' +
              `first expert that has it. Of the whole model: ${report.findings.length -
              found.length} more.` + (read.length || report.format === 'float' ? '' :
              ' The scales were not read.'),
              [['error', 'error'], ['warn', 'warning'], ['s0', 'note'], ['none', 'no finding']]),
       layers.map(layer => 'layer ' + layer), columns, (r, c) => {
         const own = at[[layers[r], columns[c]]] || [];
         const worst = Object.keys(kinds).find(key => own.some(f => f.severity === key));
         const texts = own.map(f => `${f.severity} ${f.id} (${f.count}): ${f.tensor}: ` +
             `expected ${f.expected}, got ${f.actual}`);
         return {kind: kinds[worst] || 'none', tip: `layer ${layers[r]}, expert ${columns[c]}: ` +
             (texts.join('\n') || 'no finding')};
       });

  const of = [['experts_bytes', 'experts'], ['other_bytes', 'other tensors'],
              ['workspace_bytes', 'workspace']];
  const memories = row => Object.keys(row).filter(key => key.startsWith('fits_') && row[key])
      .map(key => key.slice(5, -2)).join(', ') || 'none';
  if (fit.length)
    bars(figure('fit', 'Bytes on each GPU', 'Under expert parallel, with a workspace for ' +
                report.fit_max_tokens + ' tokens; without KV cache and other activations.',
                of.map(([, name], i) => ['s' + i, name])),
         fit.map(row => ({
           label: plural(row.ranks, 'GPU'),
           text: `${bytes(row.total_bytes)}, fits ${memories(row)} GB`,
           parts: of.map(([key, name], i) => (
               {value: row[key], kind: 's' + i, tip: name + ': ' + bytes(row[key])}))})));
}

function verify() {
  const layers = report.details?.layers || [], run = layers.filter(l => l.run);
  const original = layers.filter(l => l.original);
  const errors = (rows, kind, curve, name, value) => ({
    kind, curve, name, points: rows.map(l => ({x: l.layer, y: number(value(l)),
        tip: `layer ${l.layer}, ${name}: ${short(number(value(l)))}`}))});
  const curves = report.ranks
      ? [errors(report.checks || [], 's0', 'solid', 'relative L2', l => l.relative_l2)]
      : [errors(run, 's0', 'solid', 'relative L2', l => l.run.relative_l2),
         errors(run, 's1', 'solid', 'worst token', l => l.run.worst_token_l2),
         errors(run, 's0', 'dash', 'limit', l => l.run.limit_relative_l2),
         errors(run, 's1', 'dash', 'limit of a token', l => l.run.limit_worst_token_l2)];
  const than = report.ranks ? `${report.ranks} ranks against one` : 'Against the exact reference';
  if (curves[0].points.length)
    plot(figure('errors', 'Error of each layer',
                than + '. A dashed line is a limit; an error of 0 is on the axis.',
                curves.map(s => [s.curve === 'dash' ? 'dash' : s.kind, s.name])
                    .filter(([kind]) => kind !== 'dash')),
         curves, curves[0].points.map(p => p.x), 'layer');

  const keys = ['gate_sqnr_db', 'up_sqnr_db', 'down_sqnr_db', 'sqnr_db'];
  if (original.length)
    heat(figure('sqnr', 'Signal to quantization noise by layer, dB',
                'Against the original. A stronger colour is a smaller error: 10 to 30 dB.'),
         ['gate', 'up', 'down', 'all'], original.map(l => l.layer), (r, c) => {
           const db = original[c].original[keys[r]] ?? Infinity;
           return {kind: 's0', share: Math.max(0.05, Math.min(0.9, (db - 10) / 20)),
                   text: isFinite(db) ? db.toFixed(1) : '\u221e',
                   tip: `layer ${original[c].layer}: ${db} dB`};
         });

  const expertCount = rows => upTo(Math.max(...rows.map(l => l.num_experts)));
  const names = rows => rows.map(l => 'layer ' + l.layer);
  const errorTitle = 'Error by layer and expert';
  if (original.length) {
    const own = {};
    for (const l of original)
      for (const e of l.original.experts) own[[l.layer, e.expert]] = number(e.relative_l2);
    const finite = ascending(Object.values(own).filter(isFinite));
    const least = finite[0], most = finite[finite.length - 1];
    heat(figure('expert-errors', errorTitle,
                `Relative L2 of an expert's weights against the original: ${short(least)} to ` +
                `${short(most)}. A stronger colour is a larger error.`,
                [['s1', 'error'], ['error', 'not finite'], ['none', 'not compared']]),
         names(original), expertCount(original), (r, c) => {
           const layer = original[r].layer, error = own[[layer, c]];
           const share = most > least ? (error - least) / (most - least) : 0;
           return {kind: error === undefined ? 'none' : isFinite(error) ? 's1' : 'error',
                   share: isFinite(error) ? 0.15 + 0.85 * share : 1,
                   tip: `layer ${layer}, expert ${c}: ` +
                       (error === undefined ? 'not compared' : short(error))};
         });
  } else if (layers.length) {
    figure('expert-errors', errorTitle, 'Not drawn: this needs --against ORIGINAL. The error ' +
           'against the exact reference is that of a token, which adds up several experts.');
  }

  const loads = run.filter(l => l.run.expert_load), loadTitle = 'Expert load by layer';
  if (loads.length) {
    heat(figure('load', loadTitle, `Assignments of each expert, by the topk_ids in ` +
                `${report.input}. The strongest colour is the most in a layer.`,
                [['s0', 'assignments'], ['none', 'none']]),
         names(loads), expertCount(loads), (r, c) => {
           const l = loads[r], load = l.run.expert_load, some = load[c];
           const all = load.reduce((a, b) => a + b, 0);
           return {kind: some ? 's0' : 'none',
                   share: some ? 0.1 + 0.7 * some / Math.max(...load) : 1, text: String(some ?? ''),
                   tip: `layer ${l.layer}, expert ${c}: ${some} of ${all} assignments of ` +
                       `${plural(l.run.tokens, 'token')}, ${short(some * load.length / all)} ` +
                       `times the mean`};
         });
  } else if (run.length) {
    figure('load', loadTitle, 'Not drawn: the ids of this run were drawn from the seed, and ' +
           'verify does not run the router. Pass --input FILE with hidden and topk_ids of the ' +
           "model to see the experts' load for these tokens.");
  }

  const counts = report.saturation || [];
  const shares = ['hidden_saturated', 'hidden_zeroed', 'intermediate_saturated',
                  'intermediate_zeroed'];
  if (run.length)
    heat(figure('saturation', 'Saturation by layer',
                'Share of activation blocks whose scale is limited at 448 or rounds to zero.',
                [['s1', 'some; the stronger, the more'], ['none', 'none']]),
         ['hidden at 448', 'hidden to zero', 'intermediate at 448', 'intermediate to zero'],
         counts.map(l => l.layer), (r, c) => {
           const some = counts[c][shares[r]], of = counts[c][shares[r].split('_')[0] + '_blocks'];
           return {kind: some ? 's1' : 'none', share: some ? 0.2 + 0.8 * some / of : 1,
                   text: of ? percent(some / of) : '',
                   tip: `layer ${counts[c].layer}: ${some} of ${of} blocks`};
         });

  const checked = layers.filter(l => l.packed || l.original), at = {};
  for (const l of checked)
    for (const f of [l.packed, l.original].flatMap(check => check?.faults || []))
      (at[[l.layer, f.expert]] ||= []).push(
          `${f.tensor} (${f.row}, ${f.col}) ${f.what}: expected ${f.expected}, got ${f.actual}`);
  if (checked.length)
    heat(figure('faults', 'Faults by layer and expert', 'Weights against the bytes of the file ' +
                'and the original. Of many faults the report has the first.' +
                (original.length ? ' A frame is at the largest error of its layer.' : ''),
                [['error', 'fault'], ['none', 'no fault']]),
         checked.map(l => 'layer ' + l.layer),
         upTo(Math.max(...checked.map(l => l.num_experts))), (r, c) => {
           const l = checked[r], faults = at[[l.layer, c]];
           return {kind: faults ? 'error' : 'none', ring: l.original?.max_expert === c,
                   tip: `layer ${l.layer}, expert ${c}: ${faults?.join('\n') || 'no fault'}`};
         });
}

function bench() {
  const timed = (report.timings || []).filter(t => t.median_us !== null);
  const tokens = ascending(timed.map(t => t.tokens));
  const words = (t, keys) => keys.map(key => t[key]).filter(word => word).join(' ');
  const name = t => words(t, ['backend', 'activation_format']);
  const names = unique(timed.map(name)), kind = t => 's' + names.indexOf(name(t)) % 6;
  if (report.ranks) {
    for (const count of tokens) {
      const rows = timed.filter(t => t.tokens === count);
      bars(figure('times-' + count, `Time of a layer, ${plural(count, 'token')}`,
                  `Over ${report.ranks} ranks: the slowest counts.`,
                  [['s4', 'one rank'], ['s0', 'all ranks']]),
           rows.map(t => ({
             label: words(t, [...names.length > 1 ? ['activation_format'] : [], 'routing',
                              'combine', 'over', 'placement']),
             text: short(t.median_us) + ' us',
             parts: [{value: t.median_us, kind: t.combine === 'one_rank' ? 's4' : 's0',
                      tip: name(t)}]})));
    }
  } else if (timed.length) {
    const curves = (key, curve) => names.map(own => timed.filter(t => name(t) === own))
        .map(rows => ({kind: kind(rows[0]), curve, points: rows.map(t => (
            {x: t.tokens, y: t[key],
             tip: `${name(t)}, ${plural(t.tokens, 'token')}: ${short(t[key])} us`}))}));
    plot(figure('times', 'Time of a layer, us', 'Medians. The dashed line is the floor: the ' +
                'larger of bytes over read rate and operations over peak.',
                names.map((own, i) => ['s' + i % 6, own])),
         [...curves('floor_us', 'dash'), ...curves('median_us', 'solid')], tokens, 'tokens');
    bars(figure('shares', 'Share of the nearest limit',
                'That limit is the read rate or a peak. A busy host can pass 100 %.'),
         timed.map(t => ({
           label: `${name(t)}, ${plural(t.tokens, 'token')}`,
           text: `${percent(t.limit_share)} of ${t.limit}`,
           parts: [{value: t.limit_share, kind: kind(t), tip: short(t.median_us) + ' us'}]})), 1);
  }
}

function draw() {
  const wide = Math.max(640, pictures.clientWidth - 36);
  if (wide === width) return;
  width = wide;
  pictures.replaceChildren();
  ({inspect, verify, bench})[report.verb]();
}
draw();
addEventListener('resize', draw);
)js";

constexpr std::string_view kPageScriptHash = "22g5AqmI1g99HRoFXvZjps6eX1UqXJh0c41UQit4p28=";

}  // namespace nvfp4_moe::internal::cli
