// Golden vectors (format: page 53) answered with naive attention in doubles: node vectors_reader.mjs DIR OUT; FAULT=... plants a fault
import fs from "node:fs";
const [dir, out] = process.argv.slice(2), fault = process.env.FAULT;

// numbers of 2 bytes: 1 sign bit, E bits of exponent, M of mantissa
function decode(n, E, M) {
  const top = 2 ** E - 1, e = (n >> M) & top, m = n & (2 ** M - 1), sign = n >> 15 ? -1 : 1;
  return sign * (e === top ? (m ? NaN : Infinity) : (e ? 2 ** M + m : m) * 2 ** (Math.max(e, 1) - (top >> 1) - M));
}
function encode(x, E, M) {
  const top = 2 ** E - 1, v = new DataView(new Float64Array([x]).buffer), e = Math.max(((v.getUint16(6, true) >> 4) & 2047) - 1023, 1 - (top >> 1));
  if (Number.isNaN(x)) return (top << M) + 1;
  const m = Math.abs(x) * 2 ** (M - e) + 2 ** 52 - 2 ** 52; // to the nearest integer, ties to even; a carry moves into the exponent
  return ((v.getUint8(7) & 128) << 8) | Math.min(m + (e + (top >> 1) - 1) * 2 ** M, top << M);
}
const TYPES = {
  F64: [8, (v, p) => v.getFloat64(p, true), (v, p, x) => v.setFloat64(p, x, true)],
  F32: [4, (v, p) => v.getFloat32(p, true), (v, p, x) => v.setFloat32(p, x, true)],
  F16: [2, (v, p) => decode(v.getUint16(p, true), 5, 10), (v, p, x) => v.setUint16(p, encode(x, 5, 10), true)],
  BF16: [2, (v, p) => decode(v.getUint16(p, true), 8, 7), (v, p, x) => v.setUint16(p, encode(x, 8, 7), true)],
  BOOL: [1, (v, p) => v.getUint8(p)], I32: [4, (v, p) => v.getInt32(p, true)],
  I64: [8, (v, p) => Number(v.getBigInt64(p, true))],
};

function read(file, names) {
  const bytes = fs.readFileSync(file), v = new DataView(bytes.buffer, bytes.byteOffset, bytes.length), n = 8 + Number(v.getBigUint64(0, true));
  const header = JSON.parse(bytes.subarray(8, n));
  return Object.fromEntries(names.map((name) => {
    const { dtype, shape, data_offsets: [begin, end] } = header[name], [size, get] = TYPES[dtype];
    return [name, { dtype, shape, x: Float64Array.from({ length: (end - begin) / size }, (_, i) => get(v, n + begin + i * size)) }];
  }));
}
function write(file, tensors) {
  let header = {}, parts = [], end = 0;
  for (const [name, { dtype, shape, x }] of Object.entries(tensors)) {
    const [size, , put] = TYPES[dtype], part = new DataView(new ArrayBuffer(x.length * size));
    x.forEach((y, i) => put(part, i * size, y));
    header[name] = { dtype, shape, data_offsets: [end, (end += parts[parts.push(Buffer.from(part.buffer)) - 1].length)] };
  }
  const text = Buffer.from(JSON.stringify(header)), length = Buffer.from(new BigUint64Array([BigInt(text.length)]).buffer);
  fs.writeFileSync(file, Buffer.concat([length, text, ...parts]));
}

// attention: t has the tensors, query, key and value of rank 4; w the words
const at = (t, i) => t.shape.reduce((n, size, d) => n * size + (size === 1 ? 0 : i[d + i.length - t.shape.length]), 0); // broadcast from the right
const sum = (n, f) => { let s = 0; for (let e = 0; e < n; e++) s += f(e); return s; };
function seen(t, w, b, h, i, j, [ip, jp, L, S]) { // ip, jp: counted in their sequence
  const n = t.kv_lengths ? t.kv_lengths.x[b] : S, p = w.alignment === "lower_right" ? ip + n - L : ip, m = t.attn_mask, [left, right] = w.window_size;
  if (jp >= n || (w.is_causal && jp > p) || (left >= 0 && jp < p - left) || (right >= 0 && jp > p + right - (fault === "window"))) return false;
  if (m && (m.dtype === "BOOL" ? !m.x[at(m, [b, h, i, j])] : m.x[at(m, [b, h, i, j])] === -Infinity)) return false;
  return !t.block_mask || t.block_mask.x[at(t.block_mask, [b, h, i, j])] === 1;
}
function attend(t, w) {
  const { query: q, key: k, value: v, table, slopes, sinks } = t, [B, H, L, E] = q.shape, [Hkv, S, Ev] = v.shape.slice(1), g = {};
  const o = new Float64Array(B * H * L * Ev), lse = new Float64Array(B * H * L), max_scores = new Float64Array(B * H * L);
  const bias = t.attn_mask?.dtype !== "BOOL" && t.attn_mask, learned = { q, k, v, bias, sinks, table, slopes };
  for (const [name, x] of Object.entries(learned)) if (x) g[`d${name}`] = new Float64Array(x.x.length);
  for (let b = 0; b < B; b++) for (let h = 0; h < H; h++) for (let i = 0; i < L; i++) {
    const hk = fault === "heads" ? h % Hkv : Math.floor(h / (H / Hkv)), r = (b * H + h) * L + i, s = [], slope = [], keys = [];
    const far = (table?.shape[1] - 1) / 2, K = (j, e) => at(k, [b, hk, j, e]), V = (j, e) => at(v, [b, hk, j, e]), A = (j) => at(bias, [b, h, i, j]);
    const T = (j) => h * table.shape[1] + Math.min(Math.max(j - i, -far), far) + far;
    for (let j = 0; j < S; j++) {
      const place = t.place ? t.place(i, j) : [i, j, L, S];
      if (!place || !seen(t, w, b, h, i, j, place)) continue;
      const raw = w.scale * sum(E, (e) => q.x[r * E + e] * k.x[K(j, e)]), tanh = w.softcap > 0 ? Math.tanh(raw / w.softcap) : 0;
      s[j] = w.softcap > 0 ? w.softcap * tanh : raw;
      if (w.score === "relative") s[j] += table.x[T(j)];
      if (w.score === "alibi_learned") s[j] -= slopes.x[b * H + h] * Math.abs(i - j);
      if (bias) s[j] += bias.x[A(j)];
      slope[j] = w.scale * (1 - tanh * tanh);
      keys.push(j);
    }
    const sink = sinks ? sinks.x[h] : -Infinity, top = (max_scores[r] = Math.max(-Infinity, ...keys.map((j) => s[j]))), m = Math.max(sink, top);
    const l = keys.reduce((l, j) => l + Math.exp(s[j] - m), Math.exp(sink - m)), p = s.map((x) => (x === -Infinity ? 0 : Math.exp(x - m) / l));
    const keep = (j) => (!t.keep ? 1 : t.keep.x[r * S + j] ? 1 / (1 - w.dropout_p) : 0);
    lse[r] = Math.abs(m) === Infinity ? m : m + Math.log(l);
    for (let e = 0; e < Ev; e++) for (const j of keys) o[r * Ev + e] += p[j] * keep(j) * v.x[V(j, e)];
    if (fault === "empty" && !keys.length) o.fill(NaN, r * Ev, (r + 1) * Ev);
    if (t.d_out) {
      const go = t.d_out.x.subarray(r * Ev, (r + 1) * Ev), delta = sum(Ev, (e) => go[e] * o[r * Ev + e]) - (t.d_lse ? t.d_lse.x[r] : 0);
      if (sinks && lse[r] !== -Infinity) g.dsinks[h] -= (Math.exp(sink - m) / l) * delta;
      for (const j of keys) {
        const ds = p[j] * (keep(j) * sum(Ev, (e) => go[e] * v.x[V(j, e)]) - delta), dx = ds * slope[j];
        for (let e = 0; e < Ev; e++) g.dv[V(j, e)] += p[j] * keep(j) * go[e];
        for (let e = 0; e < E; e++) { g.dq[r * E + e] += dx * k.x[K(j, e)]; g.dk[K(j, e)] += (fault === "dk" ? ds : dx) * q.x[r * E + e]; }
        if (bias) g.dbias[A(j)] += ds;
        if (table) g.dtable[T(j)] += ds;
        if (slopes) g.dslopes[b * H + h] -= ds * Math.abs(i - j);
      }
    }
  }
  return { out: o, lse: fault === "lse" ? lse.map((x) => x / Math.LN2) : lse, max_scores, ...g };
}

// packed sequences are one dense problem in which a query meets the keys of its own sequence
const swap = ([a, b, c], x) => x.map((_, n) => x[((Math.floor(n / c) % a) * b + Math.floor(n / (a * c))) * c + (n % c)]); // (a, b, c) to (b, a, c)
const back = (x, shape) => swap([shape.at(-2), x.length / shape.at(-2) / shape.at(-1), shape.at(-1)], x); // heads and tokens change places again
function unpack(t) {
  const cq = t.cu_seq_q.x, ck = t.cu_seq_k?.x, table = t.block_table, rows = t.key.shape[1], q = [], k = [], dense = { d_lse: t.d_lse };
  for (let n = 0; n < cq.length - 1; n++) {
    const L = cq[n + 1] - cq[n], S = t.seqused_k ? t.seqused_k.x[n] : ck[n + 1] - ck[n];
    for (let i = 0; i < L; i++) q[cq[n] + i] = [n, i, L, S];
    for (let j = 0; j < S; j++) k[table ? table.x[n * table.shape[1] + Math.floor(j / rows)] * rows + (j % rows) : ck[n] + j] = [n, j];
  }
  for (const name of ["query", "key", "value", "d_out"]) {
    const { shape, x } = t[name], [H, E] = shape.slice(-2), T = shape.slice(0, -2).reduce((a, b) => a * b);
    dense[name] = { shape: [1, H, T, E], x: swap([T, H, E], x) };
  }
  return { ...dense, place: (i, j) => q[i] && k[j] && q[i][0] === k[j][0] && [q[i][1], k[j][1], q[i][2], q[i][3]] };
}
const rank4 = (shape) => (shape.length < 4 ? [1, 1, ...shape].slice(-4) : [shape.slice(0, -3).reduce((a, b) => a * b), ...shape.slice(-3)]);
fs.mkdirSync(out, { recursive: true });
for (const { file, words, inputs, outputs } of JSON.parse(fs.readFileSync(`${dir}/manifest.json`)).cases) {
  const t = read(`${dir}/${file}`, Object.keys(inputs)), packed = words.kind === "packed";
  if (!packed) for (const name of ["query", "key", "value"]) t[name].shape = rank4(t[name].shape);
  const found = attend(packed ? unpack(t) : t, packed ? { ...words, alignment: "lower_right" } : words);
  for (const [n, o] of Object.entries(outputs)) o.x = packed && n !== "lse" ? back(found[n], o.shape) : found[n];
  write(`${out}/${file}`, outputs);
}
