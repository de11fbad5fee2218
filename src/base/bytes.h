// The one codec of what leaves the process: fields in their order, little-endian.
//
// A type names its fields once, for both directions:
//
//   template <typename Self, typename Io>
//   static void Fields(Self& m, Io& io) { io(m.node, m.name, m.members); }
//   bool Valid() const;  // where there is one: what the fields' types do not say
//
//   number, std::byte   its bytes; bool: one byte, 0 or 1
//   std::array          its elements
//   string, vector      how many, 32 bits, and its elements
//   std::variant        which one, 8 bits, and its fields
//   a type with Fields  its fields
//
// Reading trusts nothing: a length is believed only as far as there are bytes, before memory is
// taken, and after the first thing that is wrong nothing more is read.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace forebay {

static_assert(std::endian::native == std::endian::little);

// Read and written as they lie in memory, many at once.
template <typename T>
concept PlainField =
    (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) || std::is_same_v<T, std::byte>;

template <typename T>
concept HasFields = requires(T& m, int& io) {
  T::Fields(m, io);
};

// Appends to a std::vector<std::byte> or a std::string, which it borrows.
template <typename Out>
class FieldWriter {
 public:
  explicit FieldWriter(Out* out) : out_(out) {}

  template <typename... Ts>
  void operator()(const Ts&... fields) {
    (Put(fields), ...);
  }
  // Lists of one length, which is said once.
  template <typename First, typename... Rest>
  void Columns(const std::vector<First>& first, const std::vector<Rest>&... rest) {
    Put(static_cast<uint32_t>(first.size()));
    Elements(first.data(), first.size());
    (Elements(rest.data(), first.size()), ...);
  }
  // Without a count.
  template <PlainField T>
  void Elements(const T* values, size_t count) {
    const size_t at = out_->size();
    out_->resize(at + count * sizeof(T));
    if (count != 0) std::memcpy(out_->data() + at, values, count * sizeof(T));
  }
  // Bytes that are always the same.
  void Literal(std::string_view text) { Elements(text.data(), text.size()); }
  // With a length of 8 bits: what is longer is cut.
  void ShortText(std::string_view text) {
    text = text.substr(0, std::numeric_limits<uint8_t>::max());
    Put(static_cast<uint8_t>(text.size()));
    Literal(text);
  }
  // One of those up to the last.
  template <typename E>
  void Enum(E value, E /*last*/) {
    Put(static_cast<std::underlying_type_t<E>>(value));
  }
  // Over what was written earlier.
  template <PlainField T>
  void PutAt(size_t at, T value) {
    std::memcpy(out_->data() + at, &value, sizeof value);
  }

 private:
  template <PlainField T>
  void Put(T value) {
    Elements(&value, 1);
  }
  template <std::same_as<bool> T>
  void Put(T value) {
    Put(static_cast<uint8_t>(value));
  }
  template <PlainField T, size_t kCount>
  void Put(const std::array<T, kCount>& values) {
    Elements(values.data(), kCount);
  }
  void Put(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    Literal(text);
  }
  template <typename T>
  void Put(const std::vector<T>& list) {
    if constexpr (PlainField<T>) {
      Columns(list);
    } else {
      Put(static_cast<uint32_t>(list.size()));
      for (const T& one : list) Put(one);
    }
  }
  template <typename... Ts>
  void Put(const std::variant<Ts...>& one) {
    Put(static_cast<uint8_t>(one.index()));
    std::visit([this](const auto& m) { this->Put(m); }, one);
  }
  template <HasFields T>
  void Put(const T& m) {
    T::Fields(m, *this);
  }

  Out* const out_;
};

// Borrows the bytes.
class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> in) : in_(in) {}
  explicit FieldReader(std::string_view in) : in_(std::as_bytes(std::span(in))) {}

  template <typename... Ts>
  void operator()(Ts&... fields) {
    (Get(fields), ...);
  }
  template <PlainField... Ts>
  void Columns(std::vector<Ts>&... columns) {
    uint32_t count = 0;
    Get(count);
    (Elements(columns, count), ...);
  }
  // A vector's or a string's, whose count is known otherwise. Wrong: none.
  template <typename Container>
  void Elements(Container& values, size_t count) {
    using T = typename Container::value_type;
    static_assert(PlainField<T>);
    Require(count <= in_.size() / sizeof(T));
    values.resize(ok_ ? count : 0);
    Take(values.data(), values.size() * sizeof(T));
  }
  void Literal(std::string_view text) { Require(View(text.size()) == text); }
  void ShortText(std::string& text) {
    uint8_t count = 0;
    Get(count);
    Elements(text, count);
  }
  template <typename E>
  void Enum(E& value, E last) {
    std::underlying_type_t<E> number{};
    Get(number);
    Require(number <= static_cast<std::underlying_type_t<E>>(last));
    if (ok_) value = static_cast<E>(number);
  }
  // The next bytes where they lie. Wrong, and none: there are fewer.
  std::string_view View(size_t bytes) {
    Require(bytes <= in_.size());
    if (!ok_) return {};
    const auto* at = reinterpret_cast<const char*>(in_.data());
    in_ = in_.subspan(bytes);
    return {at, bytes};
  }

  void Require(bool good) { ok_ = ok_ && good; }
  bool ok() const { return ok_; }
  size_t left() const { return in_.size(); }
  // Nothing was wrong and nothing is left.
  bool done() const { return ok_ && in_.empty(); }

 private:
  void Take(void* to, size_t bytes) {
    const std::string_view from = View(bytes);
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
  }
  template <PlainField T>
  void Get(T& value) {
    Take(&value, sizeof value);
  }
  void Get(bool& value) {
    uint8_t byte = 0;
    Get(byte);
    Require(byte <= 1);
    value = byte == 1;
  }
  template <PlainField T, size_t kCount>
  void Get(std::array<T, kCount>& values) {
    Take(values.data(), sizeof values);
  }
  void Get(std::string& text) {
    uint32_t count = 0;
    Get(count);
    Elements(text, count);
  }
  template <typename T>
  void Get(std::vector<T>& list) {
    if constexpr (PlainField<T>) {
      Columns(list);
    } else {
      uint32_t count = 0;
      Get(count);
      // Each has a byte at least; memory grows with what has been read.
      Require(count <= in_.size());
      list.clear();
      for (uint32_t i = 0; ok_ && i < count; ++i) Get(list.emplace_back());
    }
  }
  template <typename... Ts>
  void Get(std::variant<Ts...>& one) {
    uint8_t which = 0;
    Get(which);
    Require(which < sizeof...(Ts));
    if (!ok_) return;
    size_t number = 0;
    ((number++ == which ? Get(one.template emplace<Ts>()) : void()), ...);
  }
  template <HasFields T>
  void Get(T& m) {
    T::Fields(m, *this);
    if constexpr (requires { m.Valid(); }) Require(ok_ && m.Valid());
  }

  std::span<const std::byte> in_;
  bool ok_ = true;
};

}  // namespace forebay
