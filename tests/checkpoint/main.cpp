#include <gtest/gtest.h>

#include <string>

#include "tests/checkpoint/kill_helper.h"

int main(int argc, char** argv) {
  using namespace dovetail::checkpoint_test;
  if (argc == 4 && std::string(argv[1]) == kHelperFlag)
    return run_kill_helper(argv[2], std::stoll(argv[3]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
