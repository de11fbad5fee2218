// JSON, strictly as RFC 8259 has it: what control state and policies are written in.
//
// UTF-8 only, no duplicate names, no number that does not fit, nesting of at most kMaxDepth.
// Written text is canonical: names in byte order, no spaces, the shortest digits that give the same
// number.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace forebay::control {

class JsonValue;
struct JsonMember;
using JsonArray = std::vector<JsonValue>;
using JsonObject = std::vector<JsonMember>;  // sorted by name

class JsonValue {
 public:
  static constexpr int kMaxDepth = 32;

  // Made below, where a member is complete.
  JsonValue() noexcept;  // null
  JsonValue(const JsonValue&);
  JsonValue(JsonValue&&) noexcept;
  JsonValue& operator=(const JsonValue&);
  JsonValue& operator=(JsonValue&&) noexcept;
  ~JsonValue();
  template <typename T>
  requires(!std::is_same_v<std::remove_cvref_t<T>, JsonValue>) JsonValue(T&& value)
      : value_(Hold(std::forward<T>(value))) {}  // NOLINT: implicit by design

  // kInvalidArgument with the byte at which the text ceases to be JSON.
  static Result<JsonValue> Parse(std::string_view text);
  // A number that is not finite is written as null: JSON has no word for it.
  std::string Write() const;
  void WriteTo(std::string* out) const;

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_object() const { return std::holds_alternative<JsonObject>(value_); }
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const std::string* text() const { return std::get_if<std::string>(&value_); }
  const JsonArray* array() const { return std::get_if<JsonArray>(&value_); }
  const JsonObject* object() const { return std::get_if<JsonObject>(&value_); }
  // A number without fraction and exponent that fits into 64 bits.
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  std::optional<double> number() const;
  // Also where the integer stands in quotes, as etcd writes 64-bit ones.
  std::optional<int64_t> IntegerOrText() const;

  // A member of an object; null when there is none, or this is none.
  const JsonValue* Find(std::string_view name) const;
  JsonValue* Find(std::string_view name);
  // Makes this an object if it is none.
  void Set(std::string name, JsonValue value);

  bool operator==(const JsonValue& other) const;

 private:
  using Held =
      std::variant<std::nullptr_t, bool, int64_t, double, std::string, JsonArray, JsonObject>;

  template <typename T>
  static Held Hold(T&& value);

  Held value_;
};

struct JsonMember {
  std::string name;
  JsonValue value;

  bool operator==(const JsonMember&) const = default;
};

inline JsonValue::JsonValue() noexcept = default;
inline JsonValue::JsonValue(const JsonValue&) = default;
inline JsonValue::JsonValue(JsonValue&&) noexcept = default;
inline JsonValue& JsonValue::operator=(const JsonValue&) = default;
inline JsonValue& JsonValue::operator=(JsonValue&&) noexcept = default;
inline JsonValue::~JsonValue() = default;

template <typename T>
JsonValue::Held JsonValue::Hold(T&& value) {
  using V = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<V, bool> || std::is_same_v<V, std::nullptr_t>) {
    return value;
  } else if constexpr (std::is_floating_point_v<V>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_integral_v<V>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_same_v<V, JsonArray> || std::is_same_v<V, JsonObject>) {
    return std::forward<T>(value);
  } else {
    return std::string(std::forward<T>(value));
  }
}

}  // namespace forebay::control
