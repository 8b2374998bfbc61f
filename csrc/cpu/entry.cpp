#include "entry.h"

#include <string>
#include <unordered_map>

namespace specdec::cpu {
namespace {

std::unordered_map<std::string, Direct>& doors() {
  static std::unordered_map<std::string, Direct> doors;
  return doors;
}

}  // namespace

void enter_directly(const char* op, Direct direct) { doors()[op] = direct; }

Direct direct_of(const char* op) {
  const auto found = doors().find(op);
  return found == doors().end() ? nullptr : found->second;
}

}  // namespace specdec::cpu
