// MessagePack, as far as frames use it: nil, booleans, integers, floats, strings, binary, arrays and maps.

const text = new TextDecoder();

export class MsgpackError extends Error {}

// The value that the bytes hold. Binary becomes a Uint8Array on the same memory, a map an object without prototype.
export function decode(bytes) {
  const reader = new Reader(bytes);
  const value = reader.value(0);
  if (reader.at !== bytes.length) throw new MsgpackError(`${bytes.length - reader.at} bytes are left over`);
  return value;
}

const MOST_DEPTH = 32;

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(size) {
    const at = this.at;
    if (at + size > this.bytes.length) throw new MsgpackError("the bytes end too early");
    this.at = at + size;
    return at;
  }

  value(depth) {
    if (depth > MOST_DEPTH) throw new MsgpackError("the value is too deep");
    const view = this.view;
    const kind = view.getUint8(this.take(1));
    if (kind < 0x80) return kind;
    if (kind < 0x90) return this.map(kind & 0x0f, depth);
    if (kind < 0xa0) return this.array(kind & 0x0f, depth);
    if (kind < 0xc0) return this.string(kind & 0x1f);
    if (kind >= 0xe0) return kind - 0x100;
    switch (kind) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.binary(view.getUint8(this.take(1)));
      case 0xc5: return this.binary(view.getUint16(this.take(2)));
      case 0xc6: return this.binary(view.getUint32(this.take(4)));
      case 0xca: return view.getFloat32(this.take(4));
      case 0xcb: return view.getFloat64(this.take(8));
      case 0xcc: return view.getUint8(this.take(1));
      case 0xcd: return view.getUint16(this.take(2));
      case 0xce: return view.getUint32(this.take(4));
      case 0xcf: return Number(view.getBigUint64(this.take(8)));
      case 0xd0: return view.getInt8(this.take(1));
      case 0xd1: return view.getInt16(this.take(2));
      case 0xd2: return view.getInt32(this.take(4));
      case 0xd3: return Number(view.getBigInt64(this.take(8)));
      case 0xd9: return this.string(view.getUint8(this.take(1)));
      case 0xda: return this.string(view.getUint16(this.take(2)));
      case 0xdb: return this.string(view.getUint32(this.take(4)));
      case 0xdc: return this.array(view.getUint16(this.take(2)), depth);
      case 0xdd: return this.array(view.getUint32(this.take(4)), depth);
      case 0xde: return this.map(view.getUint16(this.take(2)), depth);
      case 0xdf: return this.map(view.getUint32(this.take(4)), depth);
      default: throw new MsgpackError(`byte 0x${kind.toString(16)} begins no value of a frame`);
    }
  }

  binary(size) {
    const at = this.take(size);
    return this.bytes.subarray(at, at + size);
  }

  string(size) {
    return text.decode(this.binary(size));
  }

  array(size, depth) {
    if (size > this.bytes.length - this.at) throw new MsgpackError("the bytes end too early");
    const found = new Array(size);
    for (let index = 0; index < size; index++) found[index] = this.value(depth + 1);
    return found;
  }

  map(size, depth) {
    const found = Object.create(null);
    for (let index = 0; index < size; index++) {
      const name = this.value(depth + 1);
      found[name] = this.value(depth + 1);
    }
    return found;
  }
}
